// Asks the search of the built site: `node site_search.js SITE`, queries as JSON on standard input. Runs the
// very script that browsers run, so pages come in the order in which readers see them.
const fs = require("fs")
const path = require("path")

const site = process.argv[2]
const workers = path.join(site, "assets/javascripts/workers")
const script = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf-8"))
const queries = JSON.parse(fs.readFileSync(0, "utf-8"))

const listeners = []
const receive = message => Promise.all(listeners.map(listener => listener(message)))
const answers = []
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => listeners.push(listener)
globalThis.postMessage = message => answers.push(message)
eval(fs.readFileSync(path.join(workers, script), "utf-8"))

const SETUP = 0, QUERY = 2
async function main() {
  await receive({ data: { type: SETUP, data: { ...index, options: { suggest: false } } } })
  const found = {}
  for (const query of queries) {
    await receive({ data: { type: QUERY, data: query } })
    found[query] = answers.at(-1).data.items.map(([first]) => first.location)
  }
  process.stdout.write(JSON.stringify(found))
}
main()

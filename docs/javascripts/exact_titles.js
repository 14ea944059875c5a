// Comes before the script of the site's search (docs/build_hooks.py): the page whose title is just what was typed,
// as the name of a class is, comes first. That script knows only the parts of names, which guides have more often.
// Names of several words may be typed in lower case; one of them, as `batch`, is a word that guides are about.
{
  const SETUP = 0, QUERY = 2, RESULT = 3
  const send = self.postMessage.bind(self)
  const names = new Map()
  let name = ""
  const titleOf = page => page.title.replace(/<[^>]*>/g, "")
  const isPage = page => !page.location.includes("#")
  self.addEventListener("message", ({ data: message }) => {
    if (message.type === SETUP) {
      const titles = message.data.docs.filter(isPage).map(titleOf)
      titles.filter(title => /^\w*[a-z][A-Z]\w*$/.test(title)).forEach(title => names.set(title.toLowerCase(), title))
    } else if (message.type === QUERY) {
      name = message.data.trim().split(".").pop()
      if (names.has(name)) message.data = name = names.get(name)
    }
  })
  const isNamed = parts => parts.some(one => isPage(one) && titleOf(one) === name)
  self.postMessage = message => {
    if (message.type === RESULT) message.data.items.sort((one, other) => isNamed(other) - isNamed(one))
    send(message)
  }
}

// Comes before the script of the site's search (docs/build_hooks.py): the page whose title is just what was typed,
// as the name of a class is, comes first. That script knows only the parts of names, which guides have more often.
{
  const QUERY = 2, RESULT = 3
  const send = self.postMessage.bind(self)
  let name = ""
  self.addEventListener("message", ({ data }) => {
    if (data.type === QUERY) name = data.data.trim().split(".").pop()
  })
  const titleOf = page => page.title.replace(/<[^>]*>/g, "")
  const isNamed = parts => parts.some(one => !one.location.includes("#") && titleOf(one) === name)
  self.postMessage = message => {
    if (message.type === RESULT) message.data.items.sort((one, other) => isNamed(other) - isNamed(one))
    send(message)
  }
}

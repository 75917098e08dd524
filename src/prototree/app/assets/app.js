// What the app's pages share: asking the server, saying what happened, making elements.
"use strict";
const prototree = (() => {
  // Text only ever goes in as text, so names and notes may contain anything.
  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "text") element.textContent = value;
      else if (key === "click") element.addEventListener("click", value);
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  let hiding = 0;
  function say(text, bad = false) {
    const message = document.getElementById("message");
    if (!message) return;
    message.hidden = !text;
    message.textContent = text;
    message.classList.toggle("bad", bad);
    if (text && bad) message.scrollIntoView({ block: "nearest" });
    clearTimeout(hiding);
    // On small screens it lies over the page.
    if (text && !bad && matchMedia("(max-width: 980px)").matches) hiding = setTimeout(() => { message.hidden = true; }, 15000);
  }

  async function ask(path, options = {}, attempts = 4) {
    document.body.classList.add("busy");
    try {
      const answer = await fetch(path, options);
      if (answer.status === 503 && attempts > 1) {
        const seconds = Math.min(30, Number(answer.headers.get("Retry-After")) || 1);
        say(`The server is busy; trying again in ${seconds} s …`);
        await new Promise((done) => setTimeout(done, 1000 * seconds));
        return ask(path, options, attempts - 1);
      }
      const content = await answer.json().catch(() => ({ detail: `the server answered ${answer.status}` }));
      if (!answer.ok) throw Object.assign(new Error(content.detail), { status: answer.status });
      return content;
    } catch (error) {
      if (error instanceof TypeError) throw new Error("the server does not answer; is it still running?");
      throw error;
    } finally {
      document.body.classList.remove("busy");
    }
  }

  const post = (path, content) => ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });
  return { make, say, ask, post };
})();

// Dropped, pasted, chosen or sample images go to the server; the page of the answer is opened.
"use strict";
(() => {
  const { ask, post, say } = prototree;
  const drop = document.getElementById("drop"), file = document.getElementById("file");
  let asking = false;

  async function show(question) {
    if (asking) return;
    asking = true;
    say("Asking the tree …");
    try {
      location.assign((await question()).link);
    } catch (error) {
      say(error.message, true);
      asking = false;
    }
  }

  const send = (image) => show(() => ask(`/api/decisions?name=${encodeURIComponent((image.name || "pasted image").slice(0, 100))}`,
    { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: image }));

  for (const button of document.querySelectorAll("button.thumb"))
    button.addEventListener("click", () => show(() => post("/api/decisions/sample", { split: button.dataset.split, index: Number(button.dataset.index) })));
  addEventListener("pageshow", () => { asking = false; say(""); }); // back from an answer

  if (!drop) return;
  file.addEventListener("change", () => { if (file.files.length) send(file.files[0]); file.value = ""; });
  for (const name of ["dragenter", "dragover"]) document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const image = event.dataTransfer.files[0];
    if (image) send(image);
    else say("That was not a file; drop an image from a folder.", true);
  });
  document.addEventListener("paste", (event) => {
    const image = [...event.clipboardData.files][0];
    if (image) send(image);
  });
})();

// Beside the details of a node: the way to edit it, and an invitation to give it a name.
"use strict";
document.addEventListener("prototree:select", (event) => {
  const { make, ask, post } = prototree;
  const extra = document.getElementById("node-extra"), { node, pair } = event.detail, number = node + 1;
  const field = make("input", { id: "note-here", maxlength: 200, placeholder: pair ? "such as: long beak or short" : "such as: long beak" });
  const status = make("span", { class: "small quiet", role: "status", text: "Your note will appear in the tree." });
  const form = make("form", { class: "invitation" },
    make("label", { for: "note-here", text: "What do these have in common?" }),
    make("span", { class: "inline" }, field, make("button", { class: "button", text: "Keep" })), status);
  form.addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    try {
      const { revision } = await ask("/api/health");
      await post("/api/edits", { revision, edit: { edit: "note", node: number, text: field.value } });
      sessionStorage.setItem("prototree:node", node);
      location.reload(); // the name stands on cards, in the list and in rules
    } catch (error) {
      status.textContent = error.message;
    }
  });
  ask(`/api/nodes/${number}`).then((answer) => { field.value = answer.note; }).catch(() => {});
  extra.replaceChildren(form, make("p", { class: "node-tools" }, make("a", { class: "button primary", href: `/edit/${number}`, text: `Edit question ${number}` })));
});
addEventListener("load", () => { // after a name was kept: back to where it was given
  const node = sessionStorage.getItem("prototree:node");
  sessionStorage.removeItem("prototree:node");
  if (node !== null) document.dispatchEvent(new CustomEvent("prototree:show", { detail: { node: Number(node) } }));
});

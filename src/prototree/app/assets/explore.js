// Beside the details of a node: the way to edit it, and an invitation to give it a name.
"use strict";
document.addEventListener("prototree:select", (event) => {
  const { make, ask, post } = prototree;
  const extra = document.getElementById("node-extra"), { node, pair } = event.detail;
  const field = make("input", { id: "note-here", maxlength: 200, placeholder: pair ? "such as: long beak or short" : "such as: long beak" });
  const told = make("span", { class: "small quiet", role: "status", text: "Your words will appear in the tree." });
  const form = make("form", { class: "invitation" },
    make("label", { for: "note-here", text: "What do these have in common?" }),
    make("span", { class: "inline" }, field, make("button", { class: "button", text: "Keep" })), told);
  form.addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    try {
      const { revision } = await ask("/api/health");
      await post("/api/edits", { revision, edit: { edit: "note", node, text: field.value } });
      sessionStorage.setItem("prototree:node", node);
      location.reload(); // the name stands on cards, in the list and in rules
    } catch (error) {
      told.textContent = error.message;
    }
  });
  ask(`/api/nodes/${node}`).then((found) => { field.value = found.note; }).catch(() => {});
  extra.replaceChildren(form, make("p", { class: "node-tools" }, make("a", { class: "button primary", href: `/edit/${node}`, text: pair ? "Edit this pair" : "Edit this prototype" })));
});
addEventListener("load", () => { // after a name was kept: back to where it was given
  const node = sessionStorage.getItem("prototree:node");
  sessionStorage.removeItem("prototree:node");
  if (node !== null) document.dispatchEvent(new CustomEvent("prototree:show", { detail: { node: Number(node) } }));
});

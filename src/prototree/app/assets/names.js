// Beside the details of a node: the way to edit it; and the names that people give to patches, which are edits.
"use strict";
window.prototreeName = async (node, side, text) => {
  const { ask, post } = prototree, { revision } = await ask("/api/health");
  await post("/api/edits", { revision, edit: { edit: "note", node: node + 1, side, text } });
  sessionStorage.setItem("prototree:node", node);
  location.reload(); // the name stands on cards, in the list and in rules
};
document.addEventListener("prototree:select", (event) => {
  const { make } = prototree, number = event.detail.node + 1;
  document.getElementById("node-extra").replaceChildren(make("p", { class: "node-tools" }, make("a", { class: "button primary", href: `/edit/${number}`, text: `Edit question ${number}` })));
});
addEventListener("load", () => { // after a name was kept: back to where it was given
  const node = sessionStorage.getItem("prototree:node");
  sessionStorage.removeItem("prototree:node");
  if (node !== null) document.dispatchEvent(new CustomEvent("prototree:show", { detail: { node: Number(node) } }));
});

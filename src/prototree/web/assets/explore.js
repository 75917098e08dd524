// Beside the details of a node: the way to mend it.
"use strict";
document.addEventListener("prototree:select", (event) => {
  const extra = document.getElementById("node-extra"), node = event.detail.node;
  extra.replaceChildren(prototree.make("p", { class: "node-tools" }, prototree.make("a", { class: "button primary", href: `/mend/${node}`, text: event.detail.pair ? "Mend this pair" : "Mend this prototype" })));
});

// Beside the details of a prototype: the way to mend it.
"use strict";
document.addEventListener("prototree:select", (event) => {
  const extra = document.getElementById("node-extra"), node = event.detail.node;
  extra.replaceChildren(prototree.make("p", { class: "node-tools" }, prototree.make("a", { class: "button primary", href: `/mend/${node}`, text: "Mend this prototype" })));
});

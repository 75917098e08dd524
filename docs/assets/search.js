// The search takes a leading dash for "without this word". Whoever types --sharpness means the setting: drop the dashes.
"use strict";
document.addEventListener("input", (event) => {
  const field = event.target;
  if (!field.matches(".md-search__input")) return;
  const plain = field.value.replace(/(^|\s)-+/g, "$1");
  if (plain !== field.value) field.value = plain;
}, true);

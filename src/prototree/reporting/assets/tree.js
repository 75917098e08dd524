// The page of a whole tree: pan, zoom, fold, search, and all that is known about each prototype.
//
// Reads #tree-data (see `tree_data`) and fills the elements of tree_body.html. Ids are as in the data: a node, or ~leaf.
// A node has one prototype, its own fields; where it chooses between two, those are the right one's, `other` has the left
// one's. For the browser app: selecting a node empties #node-extra and dispatches "prototree:select" on document with
// detail {node}, and {pair: true} for a pairwise node; dispatching "prototree:show" with detail {node} opens that node.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("tree-data").textContent);
  const { node: nodeSize, leaf: leafSize, family: familySize, across, below, under, aside, lean, readable, ways: mostWays } = data.sizes;
  const root = data.nodes.length ? 0 : ~0;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const narrow = matchMedia("(max-width: 760px)");
  const $ = (id) => document.getElementById(id);
  const map = $("map"), world = $("world"), cards = $("cards"), panel = $("panel");

  // ---- small things ---------------------------------------------------------------------------------------------

  // Text only ever goes in as text, so names and notes may contain anything.
  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (value === undefined || value === null) continue;
      if (key === "text") element.textContent = value;
      else if (key === "click") element.addEventListener("click", value);
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  function draw(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  const isLeaf = (id) => id < 0;
  const nodeOf = (id) => data.nodes[id];
  const leafOf = (id) => data.leaves[~id];
  const name = (label) => (label === null ? "unknown class" : data.classes[label]);
  const breakable = (text) => text.replace(/[_/](?=.)/g, "$&\u200b"); // lines may end behind these
  const apart = (text) => `\u2068${text}\u2069`; // within a sentence: each name has a direction of its own
  const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
  const isolated = (text) => (RIGHT_TO_LEFT.test(text) ? apart(text) : text);
  const named = (label, tag = "bdi") => make(tag, { text: name(label) });
  const fixed = (value) => (value === null ? "?" : value.toFixed(2));
  const choosing = data.node_kind === "pairwise";
  const sidesOf = (id) => (choosing ? [nodeOf(id).other, nodeOf(id)] : [nodeOf(id)]); // left to right
  const numberOf = (id) => id + 1; // of a node, wherever people see one; its two patches are 7L and 7R
  // People call a patch by their own words; without those by its name, such as 7L.
  const short = (side) => (side.note ? `“${isolated(side.note)}”` : side.patch);
  const hasNote = (id) => sidesOf(id).some((side) => side.note);
  const asked = (id) => (choosing ? `More like ${sidesOf(id).map(short).join(" or ")}?` : `Is ${short(nodeOf(id))} in the image?`);
  const rather = (id, right) => { const [left, own] = sidesOf(id); return right ? [own, left] : [left, own]; };

  // What is said of a turn to the right or left at a node: at a line, and in a sentence.
  function turnWord(id, right) {
    if (choosing) return rather(id, right)[0].note || rather(id, right)[0].patch;
    return right ? "present" : "absent";
  }
  function turnWords(id, right) {
    if (choosing) return `more like ${rather(id, right).map(short).join(" than ")}`;
    return `${right ? "has" : "lacks"} ${short(nodeOf(id))}`;
  }
  const turnClass = (right) => (right || choosing ? "present" : "absent"); // a pairwise node is no absence

  function percent(share) {
    if (share === null) return "?";
    if (share > 0 && share < 0.01) return "<1 %";
    if (share > 0.99 && share < 1) return ">99 %";
    return `${Math.round(100 * share)} %`;
  }

  const parents = new Map([[root, null]]);
  for (const node of data.nodes) {
    parents.set(node.left, node.id);
    parents.set(node.right, node.id);
  }
  const isPresent = (id) => parents.get(id) !== null && nodeOf(parents.get(id)).right === id;

  function wayTo(id) { // from the root down, the id itself last
    const way = [];
    for (let at = id; at !== null; at = parents.get(at)) way.push(at);
    return way.reverse();
  }

  function belowWords(id, most = 3) {
    if (isLeaf(id)) return leafOf(id).unsure ? "no clear class" : name(leafOf(id).predicted_class);
    const labels = nodeOf(id).below;
    if (!labels.length) return "no clear class";
    if (labels.length === 1) return name(labels[0]);
    const shown = labels.length <= most + 1 ? labels : labels.slice(0, most);
    const more = labels.length - shown.length;
    return `${labels.length} classes: ${shown.map((label) => apart(name(label))).join(", ")}${more ? ` and ${more} more` : ""}`;
  }

  // ---- where everything stands ----------------------------------------------------------------------------------

  const closed = new Set(); // nodes whose subtree is folded away: families of classes
  let places = new Map();

  // The same arithmetic as reporting/layout.py, for what is not folded away and for this window.
  function joined(shape, [width, height], middle, ...children) { // children: [layout, x, y]
    const start = Math.min(middle - width / 2, ...children.map(([, x]) => x));
    return {
      width: Math.max(middle + width / 2, ...children.map(([way, x]) => x + way.width)) - start,
      height: Math.max(height, ...children.map(([way, , y]) => y + way.height)),
      middle: middle - start, shape, children: children.map(([way, x, y]) => [way, x - start, y]),
    };
  }

  function tidyShape(left, right, size) {
    const top = size[1] + below, second = left.width + across;
    return [joined("below", size, (left.middle + second + right.middle) / 2, [left, 0, top], [right, second, top])];
  }

  function compactShapes(left, right, size) {
    const [width, height] = size, top = height + below, shapes = tidyShape(left, right, size);
    let middle = Math.max(left.width + across - width / 4, left.middle + lean);
    shapes.push(joined("right lower", size, middle, [left, 0, top], [right, middle + width / 4 - right.middle, top + left.height + under]));
    middle = Math.min(width / 4 - across, right.middle - lean);
    shapes.push(joined("left lower", size, middle, [left, middle - width / 4 - left.middle, top + right.height + under], [right, 0, top]));
    if (right.shape !== "left aside") {
      middle = left.middle + lean;
      shapes.push(joined("right aside", size, middle, [left, 0, top], [right, Math.max(middle + width / 2 + aside, left.width + across), 0]));
    }
    if (left.shape !== "right aside") {
      middle = right.middle - lean;
      shapes.push(joined("left aside", size, middle, [left, Math.min(middle - width / 2 - aside, -across) - left.width, 0], [right, 0, top]));
    }
    return shapes;
  }

  function best(ways, aspect) {
    const kept = [];
    for (const way of ways.sort((a, b) => a.width - b.width || a.height - b.height)) if (!kept.length || way.height < kept[kept.length - 1].height) kept.push(way);
    if (kept.length <= mostWays) return kept;
    const smallest = new Map(); // of each proportion, narrow and flat ones too
    for (const way of kept) {
      const off = Math.min(Math.max(Math.log(way.width / (aspect * way.height)), -2), 2), range = Math.floor(((off + 2) / 4) * mostWays), other = smallest.get(range);
      if (!other || way.width * way.height < other.width * other.height) smallest.set(range, way);
    }
    return [...smallest.values()];
  }

  function shownIds() { // with their levels, a parent before its children
    const order = [], waiting = [[root, 0]];
    while (waiting.length) {
      const [id, level] = waiting.pop();
      order.push([id, level]);
      if (!isLeaf(id) && !closed.has(id)) waiting.push([nodeOf(id).right, level + 1], [nodeOf(id).left, level + 1]);
    }
    return order;
  }

  // Of the window when the page was opened; a tree that jumped about with the window would be lost.
  const sheet = [Math.max(200, map.clientWidth - 48), Math.max(200, map.clientHeight - 48)], aspect = sheet[0] / sheet[1];
  const room = (way) => Math.min(sheet[0] / way.width, sheet[1] / way.height);
  const centredRoom = (way) => Math.min(sheet[0] / (2 * Math.max(way.middle, way.width - way.middle)), sheet[1] / way.height);

  function waysOf(order, shapes) {
    const ways = new Map();
    for (const [id] of [...order].reverse()) {
      const size = sizeOf(id);
      if (isLeaf(id) || closed.has(id)) { ways.set(id, [{ width: size[0], height: size[1], middle: size[0] / 2 }]); continue; }
      const lefts = ways.get(nodeOf(id).left), rights = ways.get(nodeOf(id).right);
      ways.set(id, best(lefts.flatMap((left) => rights.flatMap((right) => shapes(left, right, size))), aspect));
    }
    return ways.get(root);
  }
  const tidy = () => waysOf(shownIds(), tidyShape)[0];

  let byFamilies = false; // what does not fit is folded into families: the rest is tidy
  function arrange() {
    const order = shownIds(), cost = (way) => Math.max(way.width, aspect * way.height);
    let chosen = waysOf(order, tidyShape)[0];
    if (!byFamilies && room(chosen) < readable) chosen = waysOf(order, compactShapes).reduce((a, b) => (cost(b) < cost(a) || (cost(b) === cost(a) && b.height < a.height) ? b : a));
    const corners = new Map([[root, [chosen, 0, 0]]]);
    places = new Map();
    for (const [id, level] of order) {
      const [way, x, y] = corners.get(id), [width, height] = sizeOf(id);
      places.set(id, { x: x + way.middle - width / 2, y, width, height, middle: x + way.middle, level, shape: way.shape });
      if (way.children) [nodeOf(id).left, nodeOf(id).right].forEach((child, i) => { const [inner, dx, dy] = way.children[i]; corners.set(child, [inner, x + dx, y + dy]); });
    }
    drawn = null; // edges are drawn with the next view
    for (const [id, card] of mounted) if (!places.has(id)) unmount(id, card);
    for (const [id, card] of built) if (places.has(id)) dress(id, card);
    extent = measure();
    mosaic.forget();
    $("fold-all").textContent = closed.size ? "Expand all" : "Collapse all";
  }

  const sizeOf = (id) => (isLeaf(id) ? leafSize : closed.has(id) ? familySize : nodeSize);
  const spotOf = (id) => places.get(id);
  // How the child of a node stands to it: beside it, on the left or right, or below it.
  function sideOf(id) {
    const parent = parents.get(id);
    if (parent === null) return null;
    const way = nodeOf(parent).right === id ? "right aside" : "left aside";
    return places.get(parent).shape === way ? way : "below";
  }

  // Opens what can be read at once: the ways to the ids, then the largest families below them, then other large ones.
  const OPENED = 0.7;
  function openFamilies(ids, others = true) {
    byFamilies = true;
    for (const node of data.nodes) closed.add(node.id);
    for (const id of ids) for (const above of wayTo(id)) closed.delete(above);
    const least = Math.min(OPENED, 0.75 * centredRoom(tidy())), refused = new Set(), inside = (id) => wayTo(id).some((above) => ids.includes(above));
    for (;;) {
      const families = shownIds().map(([id]) => id).filter((id) => closed.has(id) && !refused.has(id) && (others || inside(id)));
      if (!families.length) break;
      const next = families.reduce((a, b) => (inside(b) - inside(a) || nodeOf(b).below.length - nodeOf(a).below.length) > 0 ? b : a);
      closed.delete(next);
      if (centredRoom(tidy()) < least) { closed.add(next); refused.add(next); }
    }
  }

  // Neighbours in the tree have neighbouring colours: a leaf by its place in reading order, a node that of its middle.
  const hues = new Map();
  {
    const order = [], open = [root], spans = new Map();
    while (open.length) {
      const id = open.pop();
      order.push(id);
      if (!isLeaf(id)) open.push(nodeOf(id).right, nodeOf(id).left);
    }
    let count = 0;
    for (const id of order) if (isLeaf(id)) spans.set(id, [count, count++]);
    for (const id of order.reverse()) if (!isLeaf(id)) spans.set(id, [spans.get(nodeOf(id).left)[0], spans.get(nodeOf(id).right)[1]]);
    for (const [id, [first, last]] of spans) hues.set(id, (25 + (330 * (first + last + 1)) / 2 / count) % 360);
  }
  const HUES = 24; // different colours of lines
  const band = (id) => Math.floor((hues.get(id) / 360) * HUES);

  let extent = { left: 0, top: 0, right: 1, bottom: 1 };
  function measure(ids = places.keys()) {
    const box = { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
    for (const id of ids) {
      const spot = spotOf(id);
      box.left = Math.min(box.left, spot.x);
      box.top = Math.min(box.top, spot.y);
      box.right = Math.max(box.right, spot.x + spot.width);
      box.bottom = Math.max(box.bottom, spot.y + spot.height);
    }
    return box;
  }

  // ---- edges ----------------------------------------------------------------------------------------------------

  const lines = new Map(); // one path for all edges of a colour and kind
  let trail = new Set(), subtree = new Set(); // the ways to what was chosen, and what lies below it

  let drawn = null; // the part of the world whose edges are drawn: the view and as much again on each side

  function edge(id) { // from under the side that it leads on from
    const parent = parents.get(id), from = spotOf(parent), to = spotOf(id), side = sideOf(id), right = nodeOf(parent).right === id;
    if (side === "right aside") return `M${from.x + from.width} ${from.y + 44}H${to.x}`;
    if (side === "left aside") return `M${from.x} ${from.y + 44}H${to.x + to.width}`;
    const start = from.x + from.width * (right ? 0.75 : 0.25);
    const bottom = from.y + from.height, middle = bottom + 0.3 * below, turn = Math.sign(to.middle - start) * Math.min(8, Math.abs(to.middle - start) / 2);
    return `M${start} ${bottom}V${middle - 8}Q${start} ${middle} ${start + turn} ${middle}H${to.middle - turn}Q${to.middle} ${middle} ${to.middle} ${middle + 8}V${to.y}`;
  }

  function drawEdges() {
    const wide = Math.max(1000, map.clientWidth) / view.k, high = Math.max(700, map.clientHeight) / view.k, left = -view.x / view.k, top = -view.y / view.k;
    drawn = { left: left - wide, right: left + 2 * wide, top: top - high, bottom: top + 2 * high };
    const paths = new Map();
    for (const id of places.keys()) {
      const parent = parents.get(id);
      if (parent === null) continue;
      const from = spotOf(parent), to = spotOf(id);
      if (Math.min(from.x, to.x) > drawn.right || Math.max(from.x, to.x) + 208 < drawn.left || from.y > drawn.bottom || to.y + to.height < drawn.top) continue;
      const kind = `${turnClass(isPresent(id))}${trail.has(id) ? " on" : subtree.has(id) ? " below" : ""} ${band(id)}`;
      paths.set(kind, (paths.get(kind) || "") + edge(id));
    }
    for (const kind of paths.keys()) if (!lines.has(kind)) {
      const line = draw("path", { class: kind.replace(/ \d+$/, "") });
      line.style.setProperty("--hue", (360 * (Number(kind.match(/\d+$/)[0]) + 0.5)) / HUES);
      lines.set(kind, $("edges").appendChild(line));
    }
    for (const [kind, line] of lines) line.setAttribute("d", paths.get(kind) || "");
  }

  function emphasise(id, card) {
    card.classList.toggle("on", trail.has(id));
    card.classList.toggle("below", subtree.has(id));
  }

  function highlight(ids) {
    trail = new Set(ids.flatMap(wayTo));
    subtree = new Set([...places.keys()].filter((id) => ids.some((above) => id !== above && wayTo(id).includes(above))));
    map.classList.toggle("has-trail", trail.size > 0);
    drawEdges();
    for (const [id, card] of built) emphasise(id, card);
  }

  // ---- cards ----------------------------------------------------------------------------------------------------

  const LONG = 24, LONGEST = 42; // names with more letters are written smaller, and still smaller
  const lengthOf = (title) => ([...title].length > LONGEST ? " longest" : [...title].length > LONG ? " long" : "");
  const built = new Map(); // every card made so far
  const mounted = new Map(); // those near the view, which are in the document
  let current = root, selected = null;

  function photoWithBox(node, withLabel) {
    const frame = make("span", { class: "photo" }, make("img", { src: node.photo, alt: withLabel ? `Training image of ${name(node.label)}` : "", draggable: "false", decoding: "async" }));
    frame.append(boxOver(node, node.locations[0]));
    return frame;
  }

  function boxOver(node, where) {
    const [width, height] = node.size;
    const svg = draw("svg", { class: "box", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    if (where) {
      const [left, top, right, bottom] = where.box;
      for (const part of ["under", "over"]) svg.append(draw("rect", { class: part, x: left, y: top, width: right - left, height: bottom - top }));
    }
    return svg;
  }

  const classOf = (label) => (label === null ? null : data.class_facts[label]) || { photos: [], correct: "", confused_with: [] };
  const rightTitle = (facts) => (facts.correct && `${facts.correct}, ${data.evaluated_on}`);

  // A patch with its surroundings, in a spotlight; or with the exact frame around it.
  function around(side, alt = "", { lazy = false, framed = !side.light } = {}) {
    const over = framed ? frameOver(side) : make("img", { class: "light", src: side.light, alt: "", draggable: "false" });
    if (side.context) return make("span", { class: "context" }, make("img", { src: side.context, alt, draggable: "false", decoding: "async", loading: lazy ? "lazy" : null }), over);
    const [x, y, end, foot] = side.context_box, [width, height] = side.size;
    const piece = draw("svg", { class: "piece-of", viewBox: `${x} ${y} ${Math.max(1, end - x)} ${Math.max(1, foot - y)}`, preserveAspectRatio: "none", ...(alt ? { role: "img", "aria-label": alt } : { "aria-hidden": "true" }) });
    piece.append(draw("image", { href: side.photo, width, height, preserveAspectRatio: "none" }));
    return make("span", { class: "context" }, piece, over);
  }

  function frameOver(side) {
    const [left, top, right, bottom] = side.frame;
    const svg = draw("svg", { class: "box", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const part of ["under", "over"]) svg.append(draw("rect", { class: part, x: 100 * left, y: 100 * top, width: 100 * (right - left), height: 100 * (bottom - top) }));
    return svg;
  }

  function duel(id) { // the two prototypes of a pairwise node, each on the side it leads to
    return make("span", { class: "duel" }, ...sidesOf(id).map((side) => make("span", { class: "rival" }, around(side), side.note ? make("bdi", { class: "caption note", text: side.note, title: side.note }) : null)));
  }

  function turnMark(id) { // what stands at the line to a card
    const parent = parents.get(id), right = isPresent(id);
    if (!choosing) return make("span", { class: `turn word ${turnClass(right)}`, text: turnWord(parent, right) });
    return make("span", { class: "turn" }, make("img", { src: rather(parent, right)[0].crop, alt: "", draggable: "false", decoding: "async" }));
  }

  function build(id) {
    const card = make("div", { role: "treeitem", tabindex: id === current ? 0 : -1, "data-id": id, class: `card ${isLeaf(id) ? "leaf" : "node"}` });
    card.style.setProperty("--hue", hues.get(id));
    card.append(parents.get(id) === null ? make("span", { class: "turn start", text: "start here" }) : turnMark(id));
    if (isLeaf(id)) {
      const leaf = leafOf(id), facts = classOf(leaf.predicted_class), title = leaf.unsure ? "no clear class" : name(leaf.predicted_class);
      card.classList.toggle("unsure", leaf.unsure);
      card.append(leaf.unsure || !facts.photos.length ? make("span", { class: "nophoto" }) : make("img", { class: "face", src: facts.photos[0], alt: "", draggable: "false", decoding: "async" }),
        make("bdi", { class: `name${lengthOf(title)}`, text: breakable(title) }), make("span", { class: "share", text: leaf.unsure ? "" : facts.correct }));
      card.title = title;
      card.setAttribute("aria-label", [title, leaf.unsure ? "" : rightTitle(facts)].filter(Boolean).join(", "));
    } else {
      const node = nodeOf(id);
      if (choosing) card.append(duel(id));
      else card.append(make("span", { class: "pictures" }, around(node), photoWithBox(node)), node.note ? make("bdi", { class: "caption note", text: node.note }) : "");
      card.classList.toggle("noted", hasNote(id));
      card.append(make("span", { class: "number", "aria-hidden": "true", text: numberOf(id) }), make("button", { type: "button", class: "fold", tabindex: -1 }));
    }
    dress(id, card);
    built.set(id, card);
    return card;
  }

  // A folded subtree: photos of its classes, and what they are called, by the last word of their names where it recurs.
  const FACES = 6;
  function family(id) {
    const labels = nodeOf(id).below, step = Math.max(1, labels.length / FACES);
    const faces = Array.from({ length: Math.min(FACES, labels.length) }, (_, i) => classOf(labels[Math.floor(i * step)]).photos[0]).filter(Boolean);
    return make("span", { class: "family" },
      make("span", { class: "faces-of" }, ...faces.map((face) => make("img", { src: face, alt: "", draggable: "false", decoding: "async" }))),
      make("b", { text: `${labels.length} ${labels.length === 1 ? "class" : "classes"}` }), ...members(labels));
  }
  function members(labels) {
    const kinds = new Map();
    for (const label of labels) {
      const kind = name(label).trim().split(/\s+/).pop();
      kinds.set(kind, [...(kinds.get(kind) || []), label]);
    }
    const groups = [...kinds].sort((a, b) => b[1].length - a[1].length).map(([kind, own]) => [own.length > 1 ? `${kind}\u00a0×\u00a0${own.length}` : name(own[0]), own.length]);
    const shown = groups.slice(0, groups.slice(0, 2).every(([word]) => [...word].length <= LONG) ? 2 : 1);
    const more = labels.length - shown.reduce((sum, [, count]) => sum + count, 0);
    return [make("span", { class: "members", dir: "ltr", text: shown.map(([word]) => apart(breakable(word))).join(", ") }), make("span", { class: "rest", text: more ? `and ${more} more` : "" })];
  }

  function dress(id, card) { // what changes: place, fold, selection
    const spot = spotOf(id);
    card.style.transform = `translate(${spot.x}px, ${spot.y}px)`;
    card.dataset.side = sideOf(id) || "";
    emphasise(id, card);
    card.classList.toggle("selected", id === selected);
    card.setAttribute("aria-selected", id === selected);
    card.setAttribute("aria-level", places.get(id).level + 1);
    card.tabIndex = id === current ? 0 : -1;
    if (isLeaf(id)) return;
    const folded = closed.has(id), number = nodeOf(id).below.length, button = card.querySelector(".fold");
    card.classList.toggle("folded", folded);
    card.title = folded ? belowWords(id, 12) : "";
    if (folded && !card.querySelector(".family")) card.prepend(family(id));
    card.setAttribute("aria-expanded", !folded);
    const told = sidesOf(id).map((side) => side.note || `a patch of an image of ${name(side.label)}`).join(" or more like ");
    card.setAttribute("aria-label", folded ? `Question ${numberOf(id)} and below: ${belowWords(id)}` : `Question ${numberOf(id)}: ${choosing ? "more like " : ""}${told}; below: ${belowWords(id)}`);
    button.textContent = folded ? "+" : "–";
    const action = `${folded ? "Expand" : "Collapse"} ${number} ${number === 1 ? "class" : "classes"} below`;
    button.setAttribute("aria-label", action);
    button.title = action;
  }

  function unmount(id, card) {
    card.remove();
    mounted.delete(id);
  }

  // ---- view: what part of the world is seen ---------------------------------------------------------------------

  const view = { x: 0, y: 0, k: 1 };
  const LEGIBLE = 0.32, PATH_ZOOM = 0.6; // from here on numbers on cards can be read; where a path is too long for that
  const SMALLEST_TURNS = 0.28; // below this the pictures at the lines are dots
  let frame = 0, flight = 0, zoomed = 0;

  // The part of the map that no panel covers.
  function opening() {
    const box = { left: 0, top: 0, right: map.clientWidth, bottom: map.clientHeight };
    if (!panel.hidden) {
      if (narrow.matches) box.bottom -= panel.offsetHeight;
      else box.right -= panel.offsetWidth;
    }
    return box;
  }

  function show() { // at most once a frame
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; showNow(); });
  }

  function showNow(all = false) {
    world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.k})`;
    const detail = view.k < 0.45 ? "far" : view.k < 0.8 ? "middle" : "near";
    if (map.dataset.detail !== detail) map.dataset.detail = detail;
    if (zoomed !== view.k) { // what is seen from any distance: lines, and names as far as they fit
      zoomed = view.k;
      world.style.setProperty("--edge", `${Math.max(1.8, 1.3 / view.k)}px`);
      world.style.setProperty("--number", `${Math.min(34, 9.5 / view.k)}px`);
      world.style.setProperty("--letters", `${Math.min(20.5, Math.max(12.5, 9.2 / view.k))}px`);
      world.style.setProperty("--least", `${9.2 / view.k}px`); // 9 pixels of the screen
      world.style.setProperty("--lines", Math.max(1, Math.min(3, Math.floor((50 * Math.min(view.k, 0.8)) / (1.14 * 9.2)))));
      world.style.setProperty("--smallest-letters", `${11 / view.k}px`); // at most as large as the margin above the tree
      map.classList.toggle("smallest", view.k < SMALLEST_TURNS);
    }
    const margin = 200, width = map.clientWidth, height = map.clientHeight;
    const left = (-margin - view.x) / view.k, right = (width + margin - view.x) / view.k;
    const top = (-margin - view.y) / view.k, bottom = (height + margin - view.y) / view.k;
    const fresh = [], seen = new Set();
    for (const [id, spot] of places) if (all || (spot.x < right && spot.x + spot.width > left && spot.y < bottom && spot.y + spot.height > top)) seen.add(id);
    showMosaic(!all && seen.size > MANY);
    for (const id of places.keys()) {
      const near = seen.has(id) && (!mosaicShown || trail.has(id) || id === current);
      if (near && !mounted.has(id)) {
        const card = built.get(id) || build(id);
        dress(id, card);
        mounted.set(id, card);
        fresh.push(card);
      } else if (!near && mounted.has(id) && id !== current) unmount(id, mounted.get(id));
    }
    if (fresh.length) cards.append(...fresh);
    showAbove();
    if (!drawn || -view.x / view.k < drawn.left || -view.y / view.k < drawn.top || (width - view.x) / view.k > drawn.right || (height - view.y) / view.k > drawn.bottom) drawEdges();
    drawOverview();
  }

  function showAbove() { // how much of the way to what was chosen is out of sight at the top
    const count = [...trail].filter((id) => places.has(id) && view.y + view.k * (spotOf(id).y + spotOf(id).height) < 0).length;
    $("above").hidden = !count;
    $("above").textContent = `↑ ${count} ${count === 1 ? "question" : "questions"} above`;
  }
  $("above").addEventListener("click", () => fly(fitFor(measure([...trail].filter((id) => places.has(id))), 0.9)));

  // Where very many cards are seen at once, one drawing stands for all that are not on the way to what was chosen.
  const MANY = 360;
  const mosaic = window.prototreeMosaic($("mosaic"), (id) => (isLeaf(id) ? (leafOf(id).unsure ? [] : classOf(leafOf(id).predicted_class).photos.slice(0, 1)) : sidesOf(id).map((side) => side.context || side.crop)),
    () => mosaicShown && !map.classList.contains("moving"));
  let mosaicShown = false, repaint = 0;
  function showMosaic(many) {
    if (mosaicShown !== many) map.classList.toggle("as-mosaic", (mosaicShown = many));
    if (!many) return;
    if (!mosaic.zoom) paintMosaic();
    else if (Math.abs(Math.log(mosaic.zoom / view.k)) > 0.1) { // sharp again when the zoom has settled
      clearTimeout(repaint);
      repaint = setTimeout(() => { if (mosaicShown) paintMosaic(); }, 160);
    }
  }
  function paintMosaic() {
    const style = getComputedStyle(map), light = style.getPropertyValue("--hue-light"), strength = style.getPropertyValue("--hue-strength");
    const colour = (hue) => `oklch(${light} ${strength} ${hue})`, paths = new Map();
    for (const id of places.keys()) if (parents.get(id) !== null) paths.set(band(id), (paths.get(band(id)) || "") + edge(id));
    mosaic.draw({
      k: view.k, extent, ground: style.getPropertyValue("--card"),
      cards: [...places].map(([id, spot]) => [id, spot, isLeaf(id) && leafOf(id).unsure ? style.getPropertyValue("--line") : colour(hues.get(id)), isLeaf(id)]),
      lines: [...paths].map(([number, path]) => [path, colour((360 * (number + 0.5)) / HUES)]),
    });
  }
  function cardAt(event) { // the card of the drawing at the pointer
    const box = map.getBoundingClientRect(), x = (event.clientX - box.left - view.x) / view.k, y = (event.clientY - box.top - view.y) / view.k;
    for (const [id, spot] of places) if (x >= spot.x && x <= spot.x + spot.width && y >= spot.y && y <= spot.y + spot.height) return id;
    return null;
  }
  map.addEventListener("click", (event) => {
    if (!mosaicShown || dragged || event.target.closest(".card")) return;
    const id = cardAt(event);
    if (id !== null && closed.has(id)) fold(id);
    else if (id !== null) select(id);
  });
  map.addEventListener("mousemove", (event) => {
    const id = mosaicShown && !event.buttons && !event.target.closest(".card") ? cardAt(event) : null;
    map.title = id === null ? "" : belowWords(id);
  });

  const smallest = () => Math.min(0.3, 0.7 * fitFor(extent).k);

  function zoomAt(factor, x, y) {
    const k = Math.min(3, Math.max(smallest(), view.k * factor));
    view.x = x - (x - view.x) * (k / view.k);
    view.y = y - (y - view.y) * (k / view.k);
    view.k = k;
    show();
  }

  function fitFor(box, largest = 1) {
    const open = opening(), pad = narrow.matches ? 14 : 24;
    const wide = open.right - open.left - 2 * pad, high = open.bottom - open.top - 2 * pad;
    const k = Math.max(0.02, Math.min(largest, wide / (box.right - box.left), high / (box.bottom - box.top)));
    return {
      k,
      x: (open.left + open.right) / 2 - (k * (box.left + box.right)) / 2,
      y: open.top + Math.max(pad, (open.bottom - open.top - k * (box.bottom - box.top)) / 2) - k * box.top,
    };
  }

  function fly(target, quick = false) {
    cancelAnimationFrame(flight);
    if (quick || calm.matches) {
      Object.assign(view, target);
      showNow();
      return;
    }
    const from = { ...view }, start = performance.now(), time = 320;
    const step = (now) => {
      const t = Math.min(1, Math.max(0, (now - start) / time)), ease = 1 - (1 - t) ** 3;
      // Zoom by equal ratios, so that it feels even.
      view.k = from.k * (target.k / from.k) ** ease;
      const share = Math.abs(target.k - from.k) < 1e-9 ? ease : (view.k - from.k) / (target.k - from.k);
      view.x = from.x + (target.x - from.x) * share;
      view.y = from.y + (target.y - from.y) * share;
      showNow();
      if (t < 1) flight = requestAnimationFrame(step);
    };
    flight = requestAnimationFrame(step);
  }

  function bringIntoView(id) { // the tree stays where it is, unless the card could not be seen
    const spot = spotOf(id), open = opening(), x = view.x + view.k * spot.x, y = view.y + view.k * spot.y, margin = 10;
    const shift = (start, length, low, high) => (start < low + margin ? low + margin - start : Math.min(0, Math.max(high - margin - start - length, low + margin - start)));
    const dx = shift(x, view.k * spot.width, open.left, open.right), dy = shift(y, view.k * spot.height, open.top, open.bottom);
    if (dx || dy) fly({ k: view.k, x: view.x + dx, y: view.y + dy });
    else show();
  }

  // The tree with as much room on either side of its root.
  function centred() {
    const { middle } = spotOf(root), half = Math.max(middle - extent.left, extent.right - middle);
    return { ...extent, left: middle - half, right: middle + half };
  }

  function bringBelowIntoView(id) { // what lies below a question beside its panel: as it is, moved, or smaller
    const box = measure([id, ...subtree]), open = opening(), wide = view.k * (box.right - box.left), x = view.x + view.k * box.left;
    if (isLeaf(id) || narrow.matches || view.k < LEGIBLE || (x >= open.left && x + wide <= open.right)) return;
    const fit = fitFor(box, view.k);
    if (fit.k < LEGIBLE) return;
    if (fit.k < view.k) fly(fit);
    else fly({ k: view.k, x: view.x + (x < open.left ? open.left - x : open.right - x - wide), y: view.y });
  }

  const fitAll = (quick) => {
    const around = fitFor(centred());
    if (around.k >= readable || around.k >= 0.9 * fitFor(extent).k) { fly(around, quick); return; }
    const fit = fitFor(extent), open = opening(), middle = spotOf(root).middle; // the root in the middle where there is room
    const spare = (open.right - open.left - fit.k * (extent.right - extent.left)) / 2 - 12, off = fit.k * ((extent.left + extent.right) / 2 - middle);
    fly({ ...fit, x: fit.x + Math.max(-spare, Math.min(spare, off)) }, quick);
  };

  function start() { // the whole tree where it can be read, else its families
    if (room(tidy()) < readable) {
      openFamilies([root]);
      arrange();
    }
    fitAll(true);
  }

  const pointers = new Map();
  let dragged = false;
  map.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    if (pointers.size === 1) dragged = false;
    cancelAnimationFrame(flight);
  });
  addEventListener("pointermove", (event) => {
    const last = pointers.get(event.pointerId);
    if (!last) return;
    const dx = event.clientX - last.x, dy = event.clientY - last.y;
    if (!dragged && pointers.size === 1 && Math.hypot(dx, dy) < 5) return; // a click with a trembling hand
    if (!dragged) map.setPointerCapture(event.pointerId);
    if (pointers.size === 1) map.classList.add("moving"); // what is drawn is only shifted, not drawn anew
    else map.classList.remove("moving");
    dragged = true;
    if (pointers.size === 1) {
      view.x += dx;
      view.y += dy;
      show();
    } else {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1], box = map.getBoundingClientRect();
      const before = Math.hypot(last.x - other.x, last.y - other.y), after = Math.hypot(event.clientX - other.x, event.clientY - other.y);
      view.x += dx / 2;
      view.y += dy / 2;
      zoomAt(after / Math.max(1, before), (event.clientX + other.x) / 2 - box.left, (event.clientY + other.y) / 2 - box.top);
    }
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  });
  for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, (event) => { pointers.delete(event.pointerId); map.classList.remove("moving"); });
  map.addEventListener("wheel", (event) => {
    event.preventDefault();
    cancelAnimationFrame(flight);
    const box = map.getBoundingClientRect(), unit = event.deltaMode ? 16 : 1;
    if (event.shiftKey && !event.ctrlKey) {
      view.x -= unit * (event.deltaX || event.deltaY);
      show();
    } else zoomAt(Math.exp(-unit * event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  map.addEventListener("scroll", () => map.scrollTo(0, 0)); // browsers scroll to what has the focus; the view does that

  // ---- the small map of everything ------------------------------------------------------------------------------

  const overview = $("overview");
  function drawOverview() {
    const open = opening();
    const all = view.x + view.k * extent.left >= 0 && view.x + view.k * extent.right <= open.right && view.y + view.k * extent.bottom <= open.bottom;
    overview.classList.toggle("idle", all);
    if (all || narrow.matches) return;
    const high = 52, width = Math.min(260, Math.max(70, (high * (extent.right - extent.left)) / (extent.bottom - extent.top)));
    const ratio = devicePixelRatio || 1, context = overview.getContext("2d");
    if (overview.width !== Math.round(width * ratio)) {
      overview.width = Math.round(width * ratio);
      overview.height = high * ratio;
      overview.style.width = `${width}px`;
      overview.style.height = `${high}px`;
    }
    const k = Math.min((width - 6) / (extent.right - extent.left), (high - 6) / (extent.bottom - extent.top));
    const x0 = width / 2 - (k * (extent.left + extent.right)) / 2, y0 = high / 2 - (k * (extent.top + extent.bottom)) / 2;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(overview);
    const light = style.getPropertyValue("--hue-light"), strength = style.getPropertyValue("--hue-strength");
    context.clearRect(0, 0, width, high);
    for (const [id, spot] of places) {
      context.fillStyle = isLeaf(id) ? `oklch(${light} ${strength} ${hues.get(id)})` : style.getPropertyValue("--line");
      context.fillRect(x0 + k * spot.x, y0 + k * spot.y, Math.max(1, k * spot.width), Math.max(1, k * spot.height));
    }
    context.fillStyle = style.getPropertyValue("--ink");
    for (const id of trail) if (places.has(id)) context.fillRect(x0 + k * spotOf(id).middle - 1.5, y0 + k * (spotOf(id).y + spotOf(id).height / 2) - 1.5, 3, 3);
    context.strokeStyle = style.getPropertyValue("--ink");
    context.lineWidth = 1.4;
    context.strokeRect(x0 - (k * view.x) / view.k, y0 - (k * view.y) / view.k, (k * open.right) / view.k, (k * open.bottom) / view.k);
    overview.geometry = { k, x0, y0 };
  }
  const steer = (event) => {
    if (!event.buttons || !overview.geometry) return;
    const { k, x0, y0 } = overview.geometry, box = overview.getBoundingClientRect(), open = opening();
    view.x = (open.left + open.right) / 2 - view.k * ((event.clientX - box.left - x0) / k);
    view.y = (open.top + open.bottom) / 2 - view.k * ((event.clientY - box.top - y0) / k);
    show();
  };
  overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); steer(event); });
  overview.addEventListener("pointermove", steer);

  // ---- folding --------------------------------------------------------------------------------------------------

  function fold(id, folded = !closed.has(id)) {
    if (isLeaf(id) || folded === closed.has(id)) return;
    const before = spotOf(id);
    if (folded) closed.add(id);
    else closed.delete(id);
    if (folded && wayTo(current).includes(id)) current = id;
    if (!folded && byFamilies && room(tidy()) < readable) {
      openFamilies([id]);
      arrange();
      fitAll();
      return;
    }
    arrange();
    const after = spotOf(id); // the card stays under the pointer
    view.x += view.k * (before.middle - after.middle);
    view.y += view.k * (before.y - after.y);
    showNow();
  }

  function reveal(ids) { // unfold whatever hides them; of a tree by families, show the ways to them
    const hidden = ids.flatMap((id) => wayTo(id).slice(0, -1)).filter((above) => closed.has(above));
    if (!hidden.length) return;
    if (byFamilies) openFamilies(ids, !ids.every(isLeaf));
    else for (const above of hidden) closed.delete(above);
    arrange();
    if (byFamilies && !map.hidden) showPath(ids[0]);
  }

  // The whole path where its cards can be told apart, else its end.
  function showPath(id) {
    const fit = fitFor(extent), spot = spotOf(id), open = opening();
    if (fit.k >= LEGIBLE) fitAll();
    else fly({ k: PATH_ZOOM, x: (open.left + open.right) / 2 - PATH_ZOOM * spot.middle, y: open.bottom - 24 - PATH_ZOOM * (spot.y + spot.height) });
  }

  $("fold-all").addEventListener("click", () => {
    byFamilies = !closed.size;
    if (closed.size) closed.clear();
    else if (room(tidy()) < readable) openFamilies([root]);
    else for (const [id, place] of places) if (!isLeaf(id) && place.level === 2) closed.add(id);
    for (const above of wayTo(current)) if (closed.has(above)) { current = above; break; }
    arrange();
    fitAll();
  });

  // ---- choosing -------------------------------------------------------------------------------------------------

  function goTo(id, focus = true) {
    reveal([id]);
    const last = current;
    current = id;
    for (const one of [last, id]) if (built.has(one) && places.has(one)) dress(one, built.get(one));
    if (!mounted.has(id)) {
      const card = built.get(id) || build(id);
      mounted.set(id, card);
      cards.append(card);
    }
    if (focus) mounted.get(id).focus({ preventScroll: true });
    bringIntoView(id);
  }

  function select(id, focus = true) {
    const before = selected;
    selected = id;
    reveal([id]);
    openPanel(isLeaf(id) ? leafPanel(id) : nodePanel(id));
    highlight([id]);
    for (const one of [before, id]) if (one !== null && built.has(one) && places.has(one)) dress(one, built.get(one));
    if (!map.hidden) {
      goTo(id, focus);
      bringBelowIntoView(id);
    }
    if (!isLeaf(id)) document.dispatchEvent(new CustomEvent("prototree:select", { detail: choosing ? { node: id, pair: true } : { node: id } }));
  }

  function openPanel([title, ...content]) {
    $("panel-title").textContent = title;
    $("panel-body").replaceChildren(...content.filter((part) => part !== null));
    $("node-extra").replaceChildren();
    panel.hidden = false;
    panel.scrollTop = 0;
    document.body.classList.add("with-panel");
  }

  function closePanel() {
    if (panel.hidden) return;
    const inside = panel.contains(document.activeElement);
    panel.hidden = true;
    document.body.classList.remove("with-panel");
    const before = selected;
    selected = null;
    highlight([]);
    if (before !== null && built.has(before) && places.has(before)) dress(before, built.get(before));
    if (inside && mounted.has(current)) mounted.get(current).focus({ preventScroll: true });
    if (narrow.matches && byFamilies && !map.hidden && fitFor(extent).k >= LEGIBLE) fitAll(); // the panel covered most of it
    else show();
  }

  cards.addEventListener("click", (event) => {
    const card = event.target.closest(".card");
    if (!card || dragged) return;
    const id = Number(card.dataset.id);
    if (event.target.closest(".fold") || closed.has(id)) fold(id);
    else select(id);
  });
  cards.addEventListener("focusin", (event) => { // keys go on from the card that has the focus, however it got it
    const before = current, card = event.target.closest(".card");
    current = Number(card.dataset.id);
    for (const one of [before, current]) if (built.has(one)) built.get(one).tabIndex = one === current ? 0 : -1;
  });
  map.addEventListener("dblclick", (event) => {
    const box = map.getBoundingClientRect();
    if (!event.target.closest(".card")) zoomAt(1.8, event.clientX - box.left, event.clientY - box.top);
  });
  $("panel-close").addEventListener("click", closePanel);
  document.addEventListener("prototree:show", (event) => select(event.detail.node));

  // ---- the panel of a prototype ---------------------------------------------------------------------------------

  function paintHeat(canvas, heat) {
    const bytes = Uint8Array.from(atob(heat.values), (c) => c.charCodeAt(0));
    const small = make("canvas", { width: heat.columns, height: heat.rows }), side = 144;
    const grey = small.getContext("2d").createImageData(heat.columns, heat.rows);
    bytes.forEach((value, i) => grey.data.set([value, value, value, 255], 4 * i));
    small.getContext("2d").putImageData(grey, 0, 0);
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.drawImage(small, 0, 0, side, side);
    const image = context.getImageData(0, 0, side, side), colours = data.heat_colours, last = colours.length - 1;
    for (let i = 0; i < image.data.length; i += 4) {
      const at = (image.data[i] / 255) * last, low = Math.min(last - 1, Math.floor(at)), part = at - low;
      const mix = (c) => colours[low][c] + part * (colours[low + 1][c] - colours[low][c]);
      image.data.set([mix(0), mix(1), mix(2), 255 * mix(3)], i);
    }
    context.putImageData(image, 0, 0);
  }

  const choice = { method: "peak", heat: true }; // kept from prototype to prototype

  function lookAt(node) {
    const frame = make("div", { class: "look" }, make("img", { src: node.photo, alt: `Training image of ${name(node.label)}` }));
    const canvas = make("canvas", { class: "heat", "aria-hidden": "true" }), words = make("p", { class: "words" }), meaning = make("p", { class: "quiet" });
    frame.style.maxWidth = `${Math.round((300 * node.size[0]) / node.size[1])}px`; // tall photos stay on the screen
    frame.append(canvas);
    const buttons = make("div", { class: "group", role: "group", "aria-label": "Where the prototype is in the photo" });
    const heat = make("input", { type: "checkbox" });
    heat.checked = choice.heat;
    const update = () => {
      const where = node.locations.find((one) => one.method === choice.method) || node.locations[0];
      if (!where) return;
      frame.querySelector(".box")?.remove();
      frame.append(boxOver(node, where));
      canvas.hidden = !choice.heat;
      if (choice.heat) paintHeat(canvas, where.heat);
      words.textContent = where.text;
      meaning.textContent = where.meaning;
      for (const button of buttons.children) button.setAttribute("aria-pressed", button.dataset.method === where.method);
    };
    for (const where of node.locations) buttons.append(make("button", { type: "button", "data-method": where.method, text: where.name, click: () => { choice.method = where.method; update(); } }));
    heat.addEventListener("change", () => { choice.heat = heat.checked; update(); });
    update();
    const switches = make("div", { class: "switches" }, node.locations.length > 1 ? buttons : null, make("label", {}, heat, " heat map"));
    return make("div", { class: "where" }, make("div", { class: "pair" }, make("figure", { class: "piece" }, around(node, "The patch in its exact frame, with its surroundings", { framed: true }), make("figcaption", { text: "exact frame" })), frame), switches, words, meaning);
  }

  function rows(entries, { max = 1, tone = "" } = {}) { // [label element, value, text]
    const list = make("ul", { class: `rows ${tone}` });
    for (const [label, value, text] of entries) {
      const bar = make("span", { class: "bar" }, make("i"));
      bar.firstChild.style.width = `${Math.min(100, (100 * Math.abs(value ?? 0)) / max)}%`;
      list.append(make("li", {}, make("span", { class: "what" }, label), bar, make("span", { class: "value", text })));
    }
    return list;
  }

  function section(title, hint, ...content) {
    return make("section", {}, make("h3", { text: title }), hint ? make("p", { class: "quiet", text: hint }) : null, ...content);
  }

  function leadsTo(id) {
    const go = (child, right) => {
      const side = choosing ? rather(id, right)[0] : null;
      return make("button", { type: "button", class: `lead ${turnClass(right)}`, click: () => select(child) }, side ? around(side) : null,
        make("span", { class: `word ${turnClass(right)}` }, side ? make("b", { text: side.patch }) : "", side ? " " : "", make("bdi", { text: side ? side.note : turnWord(id, right) })),
        make("span", { class: "to" }, "→ ", make("bdi", { text: belowWords(child) })));
    };
    const [left, right] = [go(nodeOf(id).left, false), go(nodeOf(id).right, true)];
    return choosing ? make("section", { class: "where" }, make("div", { class: "leads two" }, left, right)) : section("Where it leads", "", make("div", { class: "leads" }, right, left));
  }

  function whoHasIt(node, side) {
    const below = new Set(node.below), all = side.class_pass_rate.map((share, label) => [label, share]);
    const sorted = (list) => [...list].sort((a, b) => (b[1] ?? 0) - (a[1] ?? 0));
    const entry = ([label, share]) => [named(label), share, percent(share)];
    const mine = sorted(all.filter(([label]) => below.has(label))), others = sorted(all.filter(([label]) => !below.has(label)));
    if (!all.length) return null;
    const first = mine.slice(0, 10), rest = mine.slice(10);
    const more = (title, list) => {
      if (!list.length) return null;
      const details = make("details", {}, make("summary", { text: title }));
      details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(rows(list.map(entry))); });
      return details;
    };
    return section(`${choosing ? "Who goes this way" : "Who has it"}: ${side.patch}`,
      choosing ? "How many of each class’s training images are nearer to this prototype than to the other one." : "How many of each class’s training images this prototype alone would send to “present”.",
      rows(first.map(entry)), more(`${rest.length} more classes of this question`, rest), more(`${others.length} classes that do not reach this question`, others));
  }

  function whyItMatches(node) {
    if (!node.perturbation_effects.length) return null;
    const sorted = [...node.perturbation_effects].sort((a, b) => a[1] - b[1]), max = Math.max(0.3, ...sorted.map(([, change]) => Math.abs(change ?? 0)));
    const entries = sorted.map(([word, change]) => [word, Math.max(0, -(change ?? 0)), change === null ? "?" : `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(2)}`]);
    return section(`What makes ${node.patch} match`, "How the similarity changes when one property of the image is altered. A large fall: the property matters.", rows(entries, { max, tone: "warm" }));
  }

  function histogramView(id) {
    const { histogram, histogram_caption: words } = nodeOf(id);
    if (!histogram) return null;
    const drawing = make("div", { class: "histogram-frame" });
    drawing.innerHTML = histogram; // drawn by reporting/histogram.py out of numbers and fixed words alone
    const hint = choosing
      ? "Each training image by how much nearer one patch is than the other: 0 is equally near to both, 1 is the right patch itself. Above the axis the classes on the right, below it those on the left."
      : "Each training image by its distance, where 1 is the radius: above the axis the classes behind “present”, below it those behind “absent”.";
    return section("How well it separates the training images", hint, drawing, make("p", { class: "words", text: words }));
  }

  function nearestTo(side) { // patches alone: what do they have in common?
    if (!side.nearest.length) return make("p", { class: "quiet", text: "No other training patches are known here." });
    const away = choosing ? side.nearest.filter((match) => !side.towards.includes(match.label)).length : 0;
    const warning = 2 * away < side.nearest.length ? "" : make("p", { class: "words", text: `${away} of these ${side.nearest.length} show classes that do not lie on this side: the patch may be a counterweight to the other one. Think twice before you name it.` });
    return make("div", {}, warning, make("ul", { class: "nearest" }, ...side.nearest.map((match) => make("li", { title: match.image }, surroundings(match), named(match.label), make("span", { class: "value", text: fixed(match.similarity) })))));
  }

  const SURROUNDINGS = 2.4; // sides of the box that are shown
  function surroundings(match) { // what lies around a box, which is lit
    const where = match.locations[0];
    if (!match.photo || !where) return make("img", { src: match.crop, alt: "", loading: "lazy" });
    const [left, top, right, bottom] = where.box, [width, height] = match.size, box = Math.max(right - left, bottom - top);
    const side = Math.min(SURROUNDINGS * box, width, height), start = (middle, length) => Math.min(Math.max(middle - side / 2, 0), length - side);
    const x = start((left + right) / 2, width), y = start((top + bottom) / 2, height), percentOf = (value) => `${(100 * value) / side}%`;
    const piece = draw("svg", { class: "piece-of", viewBox: `${x} ${y} ${side} ${side}`, "aria-hidden": "true" }), light = make("span", { class: "disc" });
    piece.append(draw("image", { href: match.photo, width, height, preserveAspectRatio: "none" }));
    light.style.background = `radial-gradient(circle at ${percentOf((left + right) / 2 - x)} ${percentOf((top + bottom) / 2 - y)}, transparent ${percentOf(0.45 * box)}, rgb(0 0 0 / 50%) ${percentOf(0.95 * box)})`;
    return make("span", { class: "context" }, piece, light);
  }

  function nearestPhotos(side) {
    if (!side.nearest.length) return null;
    return section(`Where they are in their images: ${side.patch}`, "", make("ul", { class: "grid" }, ...side.nearest.map((match) => make("li", { title: match.image }, make("span", { class: "pictures" }, make("img", { class: "crop", src: match.crop, alt: "", loading: "lazy" }), photoWithBox(match)), named(match.label)))));
  }

  function ofSide(side, ...content) { // a part of the panel about one of the two patches
    return make("div", { class: "of-two" }, choosing ? make("h4", {}, make("b", { text: side.patch }), " ", side.note ? make("bdi", { class: "note", text: side.note }) : "") : "", ...content.filter((part) => part !== null));
  }

  function nodePanel(id) {
    const node = nodeOf(id), sides = sidesOf(id), more = make("details", { class: "more-of-it" }, make("summary", { text: "More" }));
    more.addEventListener("toggle", () => {
      if (!more.open || more.children.length > 1) return;
      more.append(...[histogramView(id), ...sides.flatMap((side) => [nearestPhotos(side), whyItMatches(side), whoHasIt(node, side)]), section("The path to this question", "", wayView(id)), section("Sources", "", ...sides.map(origin))].filter((part) => part !== null));
    });
    return [
      `Question ${numberOf(id)}`,
      make("p", { class: "asked" }, make("bdi", { text: asked(id) })),
      ...(choosing ? [] : [make("section", { class: "where" }, around(node))]),
      leadsTo(id),
      section("Most similar training patches", "One per image, with the similarity to the patch: 1 is the patch itself.", ...sides.map((side) => ofSide(side, nearestTo(side), nameForm(id, side)))),
      section("Is the box right?", "", ...sides.map((side) => ofSide(side, ...side.test_results.map((text) => make("p", { class: "words", text })), lookAt(side)))),
      more,
    ];
  }

  function origin(side) {
    const radius = choosing && side.radius !== null ? ` Of the training images of this side’s classes, 95 % come within a distance of ${fixed(side.radius)}, where the similarity is 0.5.` : "";
    const moved = !side.projected ? " The prototype is not exactly this patch, which is only the nearest to it in the images that are here."
      : side.moved >= 0.005 ? ` At the end of training the prototype was moved by ${side.moved.toPrecision(2)} to become this patch.` : "";
    return make("p", { class: "quiet small origin" }, make("b", { text: side.patch }), ": a patch of ", make("bdi", { text: side.image }), " (", named(side.label), `).${moved}${radius}`);
  }

  // ---- names that people give to patches ------------------------------------------------------------------------

  const allSides = data.nodes.flatMap((node) => sidesOf(node.id));
  const NAMES = `prototree names of ${location.pathname} ${data.fingerprint}`; // what was typed on this page, until it is saved with the run
  for (const side of allSides) side.given = side.note;
  try { // each with the name that it replaced: where the run has another one now, that is newer
    const typed = JSON.parse(localStorage.getItem(NAMES)) || {};
    for (const side of allSides) if (typed[side.patch]?.instead_of === side.given) side.note = String(typed[side.patch].name).slice(0, 200);
    storeNames();
  } catch { /* a page without storage keeps them while it is open */ }
  function renamed() { return allSides.filter((side) => side.note !== side.given); }

  function storeNames() {
    const typed = renamed().map((side) => [side.patch, { name: side.note, instead_of: side.given }]);
    if (typed.length) localStorage.setItem(NAMES, JSON.stringify(Object.fromEntries(typed)));
    else localStorage.removeItem(NAMES);
  }

  function keepName(side, text) {
    side.note = text;
    try {
      storeNames();
    } catch { /* as above */ }
    for (const [id, card] of mounted) unmount(id, card);
    built.clear();
    key.replaceChildren();
    if (!key.hidden) buildKey();
    offerNames();
    showNow();
  }

  function offerNames() {
    const count = renamed().length, button = $("save-names");
    button.hidden = !count || Boolean(window.prototreeName);
    button.textContent = `Save ${count} ${count === 1 ? "name" : "names"}`;
  }
  $("save-names").addEventListener("click", () => {
    const notes = Object.fromEntries(allSides.filter((side) => side.note).map((side) => [side.patch, side.note]));
    const file = URL.createObjectURL(new Blob([`${JSON.stringify(notes, null, 1)}\n`], { type: "application/json" }));
    make("a", { href: file, download: "notes.json" }).click();
    setTimeout(() => URL.revokeObjectURL(file), 10000);
    $("saved-names").showModal();
  });
  offerNames();

  function nameForm(id, side) {
    const field = make("input", { id: `name-${side.patch}`, maxlength: 200, autocomplete: "off", placeholder: "such as: long beak" });
    const status = make("span", { class: "small quiet", role: "status" });
    field.value = side.note;
    const form = make("form", { class: "invitation" },
      make("label", { for: field.id, text: side.note ? `Name of ${side.patch}` : `${side.patch} has no name yet: what do these have in common?` }),
      make("span", { class: "inline" }, field, make("button", { class: "button", text: "Keep" })), status,
      side.note || !side.suggested_from ? null : make("p", { class: "small suggestion" }, ...(side.suggestion ? ["Suggested, not checked: ",
        make("button", { type: "button", class: "link", click: () => { field.value = side.suggestion; field.focus(); } }, side.suggestion), ` (${side.suggested_from}).`] : [`Measured: ${side.suggested_from}.`])));
    form.addEventListener("submit", async (submitted) => {
      submitted.preventDefault();
      const text = field.value.trim();
      if (!window.prototreeName) {
        keepName(side, text);
        select(id, false);
        return;
      }
      try {
        await window.prototreeName(id, side === nodeOf(id) ? "right" : "left", text);
      } catch (error) {
        status.textContent = error.message;
      }
    });
    return form;
  }

  // ---- the panel of a leaf and of a class -----------------------------------------------------------------------

  function wayView(id) { // the turns on the way, in order
    const way = wayTo(id);
    if (way.length === 1) return make("p", { class: "quiet", text: "This is where every image starts." });
    const list = make("ol", { class: "way" });
    for (let i = 0; i + 1 < way.length; i++) {
      const node = way[i], right = nodeOf(node).right === way[i + 1], words = turnWords(node, right);
      const [own, other] = choosing ? rather(node, right) : [nodeOf(node), null];
      list.append(make("li", { class: turnClass(right) },
        make("button", { type: "button", title: words, "aria-label": words, click: () => select(node) },
          around(own, "", { lazy: true }), other ? make("img", { class: "than", src: other.crop, alt: "", loading: "lazy" }) : null,
          make("bdi", { class: "word", text: own.note || (choosing ? own.patch : `${right ? "has" : "lacks"} ${own.patch}`) }))));
    }
    return list;
  }

  function ruleView(id, label) {
    const leaf = leafOf(id), share = (leaf.shares.find(([k]) => k === label) || [0, 0])[1];
    const way = wayTo(id).slice(0, -1), turns = way.map((node, i) => [node, nodeOf(node).right === (way[i + 1] ?? id)]);
    const noted = turns.filter(([node]) => hasNote(node)).map(([node, right]) => turnWords(node, right)).join(", ");
    const sure = leaf.predicted_class === label && !leaf.unsure ? `The training images that arrive here: ${percent(share)} ` : `Here, among others: ${percent(share)} `;
    return make("div", { class: "rule" }, wayView(id), noted ? make("p", {}, noted) : null, make("p", { class: "quiet" }, sure, make("button", { type: "button", class: "link", click: () => select(id) }, named(label)), "."));
  }

  function leafPanel(id) {
    const leaf = leafOf(id), shares = [...leaf.shares].sort((a, b) => b[1] - a[1]).slice(0, 8);
    const mixed = leaf.unsure || leaf.share < 0.99 ? section("Whose training images arrive here", "", rows(shares.map(([label, share]) => [named(label), share, percent(share)]))) : null;
    if (leaf.unsure) return ["No clear class", make("p", { class: "quiet", text: "The training images that arrive here are of many classes: this leaf has no clear class." }), mixed, section("The rule that leads here", "", ruleView(id, leaf.predicted_class))];
    const others = endsOf(leaf.predicted_class).filter((other) => other !== id);
    return [name(leaf.predicted_class), ...classFacts(leaf.predicted_class), section("The rule that leads here", "", ruleView(id, leaf.predicted_class)), mixed,
      others.length ? section("Other ends for this class", "", ...others.map((other) => ruleView(other, leaf.predicted_class))) : null];
  }

  // What a class looks like, how its test photos fare, and what it is confused with.
  function classFacts(label) {
    const facts = classOf(label), wrongly = data.class_facts.flatMap((other, k) => (other?.confused_with || []).filter(([said]) => said === label).map(([, count]) => [k, count])).sort((a, b) => b[1] - a[1]);
    const pair = ([other, count]) => make("li", {}, classOf(other).photos.length ? make("img", { src: classOf(other).photos[0], alt: "", loading: "lazy" }) : null,
      make("button", { type: "button", class: "link", click: () => showClass(other) }, named(other)), make("span", { class: "value", text: `${count} image${count === 1 ? "" : "s"}` }));
    return [
      facts.photos.length ? make("ul", { class: "faces", "aria-label": "Training images of this class" }, ...facts.photos.map((photo) => make("li", {}, make("img", { src: photo, alt: `Training image of ${name(label)}`, loading: "lazy" })))) : null,
      facts.correct ? make("p", { class: "score" }, make("strong", { text: facts.correct }), ` (${data.evaluated_on} of this class).`) : null,
      facts.confused_with.length ? section("Taken for", "Test images of this class that were called something else.", make("ul", { class: "confused" }, ...facts.confused_with.slice(0, 6).map(pair))) : null,
      wrongly.length ? section("Wrongly called so", "Test images of other classes that were called this.", make("ul", { class: "confused" }, ...wrongly.slice(0, 6).map(pair))) : null,
    ];
  }

  const endsOf = (label) => data.leaves.filter((leaf) => leaf.predicted_class === label && !leaf.unsure).sort((a, b) => b.share - a.share).map((leaf) => ~leaf.id);

  function showClass(label) {
    const order = [...data.leaves].map((leaf) => [~leaf.id, leaf, (leaf.shares.find(([k]) => k === label) || [0, 0])[1]]);
    const own = order.filter(([, leaf]) => leaf.predicted_class === label && !leaf.unsure).sort((a, b) => b[2] - a[2]);
    const some = own.length ? own : order.sort((a, b) => b[2] - a[2]).slice(0, 3).filter(([, , share]) => share > 0);
    const before = selected;
    selected = null;
    if (before !== null && built.has(before) && places.has(before)) dress(before, built.get(before));
    const hint = own.length ? (own.length === 1 ? "One way leads to this class." : `${own.length} ways lead to this class.`) : "No end of the tree is for this class. It is most likely here:";
    openPanel([name(label), ...classFacts(label), section(own.length === 1 ? "The rule in pictures" : "The rules in pictures", hint, ...some.map(([id]) => ruleView(id, label)))]);
    reveal(some.map(([id]) => id));
    highlight(some.map(([id]) => id));
    if (!map.hidden && some.length) {
      if (some.length === 1) {
        current = some[0][0];
        const way = measure(wayTo(current)), fit = fitFor(way, 0.9), open = opening();
        const seen = view.k >= 0.45 && view.x + view.k * way.left >= open.left && view.y + view.k * way.top >= open.top && view.x + view.k * way.right <= open.right && view.y + view.k * way.bottom <= open.bottom;
        if (seen) show();
        else if (fit.k >= LEGIBLE) fly(fit);
        else goTo(current, false);
        showNow();
      } else fly(fitFor(measure(some.flatMap(([id]) => wayTo(id))), 0.9));
    }
  }

  // ---- finding a class ------------------------------------------------------------------------------------------

  const query = $("query"), found = $("found"), CHOICES = "[role=option]:not(.none)";
  const PLAIN = { ß: "ss", æ: "ae", œ: "oe", ø: "o", ł: "l", đ: "d", ð: "d", þ: "th", ħ: "h", ı: "i" }; // letters that are no others with marks
  const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase().replace(/[ßæœøłđðþħı]/g, (letter) => PLAIN[letter]);
  const spelled = data.classes.map(folded);
  let at = -1;

  function listFound() {
    const wanted = folded(query.value.trim());
    const labels = spelled.map((text, label) => [text.indexOf(wanted), label]).filter(([where]) => where >= 0);
    if (wanted) labels.sort((a, b) => (a[0] > 0) - (b[0] > 0) || spelled[a[1]].localeCompare(spelled[b[1]]));
    const shown = labels.slice(0, 60);
    found.replaceChildren(...shown.map(([, label], i) => make("li", { role: "option", id: `found-${i}`, "data-label": label, "aria-selected": "false" }, named(label))));
    const remark = (text) => found.append(make("li", { class: "none", role: "option", "aria-disabled": "true", text }));
    if (!shown.length) remark("no class of this name");
    if (labels.length > shown.length) remark(`and ${labels.length - shown.length} more`);
    at = -1;
    query.removeAttribute("aria-activedescendant");
    if (wanted && shown.length) mark(0);
    openFound(true);
  }

  function openFound(open) {
    found.hidden = !open;
    query.setAttribute("aria-expanded", open);
    if (!open) query.removeAttribute("aria-activedescendant");
  }

  function mark(i) {
    const options = found.querySelectorAll(CHOICES);
    if (!options.length) return;
    options[at]?.setAttribute("aria-selected", "false");
    at = (i + options.length) % options.length;
    options[at].setAttribute("aria-selected", "true");
    options[at].scrollIntoView({ block: "nearest" });
    query.setAttribute("aria-activedescendant", options[at].id);
  }

  function take(option) {
    const label = Number(option.dataset.label);
    query.value = name(label);
    openFound(false);
    query.blur();
    showClass(label);
    panel.focus({ preventScroll: true });
  }

  query.addEventListener("input", listFound);
  query.addEventListener("focus", () => { query.select(); listFound(); });
  query.addEventListener("blur", () => openFound(false));
  query.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      mark(at + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Escape") {
      query.value = "";
      query.blur();
    }
    event.stopPropagation();
  });
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const option = found.querySelector("[aria-selected=true]") || found.querySelector(CHOICES);
    if (option && !found.hidden) take(option);
  });
  found.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // keep the focus until the choice is made
    const option = event.target.closest(CHOICES);
    if (option) take(option);
  });

  // ---- the tree as a list ---------------------------------------------------------------------------------------

  const key = $("key");
  function buildKey() {
    if (key.childElementCount) return;
    key.append(make("p", { class: "quiet", text: choosing
      ? "Begin at question 1. Compare your image with both patches, and go on at the number beside the one that it is more like, until you reach a class."
      : "Begin at question 1. If you find its patch in your image, take “present”, else “absent”, until you reach a class." }));
    const list = make("ol", { class: "couplets" });
    for (const node of data.nodes) {
      const id = node.id;
      const target = (child) => (isLeaf(child)
        ? make("button", { type: "button", class: "link", click: () => select(child) }, make("bdi", { class: leafOf(child).unsure ? "quiet" : "end", text: belowWords(child) }))
        : make("a", { href: `#key-${child}`, class: "link" }, make("b", { text: `→ ${numberOf(child)}` }), " ", make("bdi", { class: "quiet", text: belowWords(child, 2) })));
      const title = make("bdi", { class: node.note ? "note" : "quiet", text: asked(id) });
      const line = (child, right) => make("p", { class: "turn-line" }, make("span", { class: `word ${turnClass(right)}`, text: turnWord(id, right) }), target(child));
      if (choosing) {
        const half = (side, right) => make("div", { class: "half" },
          make("button", { type: "button", class: "pictures", "aria-label": `Details of ${short(side)}`, click: () => select(id) }, around(side, "", { lazy: true }), photoWithBox(side)),
          make("p", { class: "turn-line" }, make("b", { class: "word present", text: side.patch }), side.note ? make("bdi", { class: "note", text: side.note }) : null),
          make("p", { class: "turn-line" }, target(right ? node.right : node.left)));
        list.append(make("li", { id: `key-${id}`, class: "couplet pair-of" }, make("h2", {}, make("b", { text: numberOf(id) })), ...sidesOf(id).map((side, i) => half(side, i === 1))));
        continue;
      }
      list.append(make("li", { id: `key-${id}`, class: "couplet" },
        make("button", { type: "button", class: "pictures", "aria-label": `Details of ${short(node)}`, click: () => select(id) }, around(node, "", { lazy: true }), photoWithBox(node)),
        make("div", {}, make("h2", {}, make("b", { text: numberOf(id) }), " ", title), line(node.right, true), line(node.left, false))));
    }
    key.append(list);
    if (!data.nodes.length) key.append(make("p", { text: `Every image is taken for ${belowWords(root)}.` }));
  }

  function present(asList) {
    if (asList) buildKey();
    key.hidden = !asList;
    map.hidden = asList;
    $("show-key").setAttribute("aria-pressed", asList);
    $("show-map").setAttribute("aria-pressed", !asList);
    document.body.classList.toggle("as-list", asList);
    $("dock").hidden = asList;
    if (!asList) { show(); if (selected !== null) bringIntoView(selected); }
  }
  $("show-key").addEventListener("click", () => present(true));
  $("show-map").addEventListener("click", () => { const first = map.hidden && !started; present(false); if (first) begin(); });
  addEventListener("hashchange", () => { if (location.hash.startsWith("#key")) present(true); });

  // ---- buttons and keys -----------------------------------------------------------------------------------------

  function zoomMiddle(factor) {
    const open = opening(), x = (open.left + open.right) / 2, y = (open.top + open.bottom) / 2;
    const k = Math.min(3, Math.max(smallest(), view.k * factor));
    fly({ k, x: x - (x - view.x) * (k / view.k), y: y - (y - view.y) * (k / view.k) });
  }
  $("zoom-in").addEventListener("click", () => zoomMiddle(1.5));
  $("zoom-out").addEventListener("click", () => zoomMiddle(1 / 1.5));
  $("zoom-fit").addEventListener("click", () => fitAll());
  const openHelp = () => { $("help").showModal(); $("help").scrollTop = 0; };
  $("help-open").addEventListener("click", openHelp);

  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    mosaic.forget();
    showNow();
  });

  const acts = {
    "/": () => query.focus(),
    "+": () => zoomMiddle(1.5),
    "=": () => zoomMiddle(1.5),
    "-": () => zoomMiddle(1 / 1.5),
    "−": () => zoomMiddle(1 / 1.5),
    0: () => fitAll(),
    "?": openHelp,
    Escape: closePanel,
  };
  const moves = {
    ArrowLeft: (id) => (isLeaf(id) ? null : nodeOf(id).left),
    ArrowRight: (id) => (isLeaf(id) ? null : nodeOf(id).right),
    ArrowDown: (id) => (isLeaf(id) ? null : nodeOf(id).left),
    ArrowUp: (id) => parents.get(id),
    Home: () => root,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const onCard = event.target.closest(".card"), inPanel = panel.contains(event.target);
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    } else if (moves[event.key] && !map.hidden && !inPanel) {
      event.preventDefault();
      const next = moves[event.key](current);
      if (next === null) return;
      if (selected !== null && !panel.hidden) select(next);
      else goTo(next);
    } else if (onCard && event.key === "Enter") {
      event.preventDefault();
      if (closed.has(current)) fold(current);
      else select(current);
    } else if (onCard && event.key === " ") {
      event.preventDefault();
      fold(current);
    }
  });

  // ---- printing, and the beginning ------------------------------------------------------------------------------

  let kept = null;
  addEventListener("beforeprint", () => {
    buildKey();
    kept = { ...view };
    const wide = 1000, high = 560;
    const scale = (box) => Math.min(1, wide / (box.right - box.left), high / (box.bottom - box.top));
    const box = scale(centred()) >= 0.8 * scale(extent) ? centred() : extent, k = scale(box);
    Object.assign(view, { k, x: (wide - k * (box.left + box.right)) / 2, y: 4 - k * box.top });
    showNow(true);
    map.style.height = `${k * (extent.bottom - extent.top) + 20}px`;
  });
  addEventListener("afterprint", () => {
    map.style.height = "";
    if (kept) Object.assign(view, kept);
    kept = null;
    showNow();
  });

  let started = false;
  function begin() {
    started = true;
    start();
    buildAhead([...places.keys()]);
  }
  // The cards that are not seen yet, a few at a time while nothing else is to do: moving and printing find them ready.
  function buildAhead(waiting) {
    if (places.size > 2 * MANY) return; // the pictures of so many would not all be kept ready
    for (const id of waiting.splice(0, 12)) if (places.has(id) && !built.has(id)) build(id);
    if (waiting.length) (window.requestIdleCallback || setTimeout)(() => buildAhead(waiting));
  }
  addEventListener("resize", () => { if (!map.hidden) show(); });
  map.dataset.sheet = JSON.stringify(sheet);
  arrange();
  if (location.hash.startsWith("#key") || narrow.matches) present(true);
  else begin();
  const asksFor = () => { // a link to a question
    const id = Number(location.hash.match(/^#question-(\d+)$/)?.[1]) - 1;
    if (data.nodes[id]) select(id);
  };
  addEventListener("hashchange", asksFor);
  asksFor();
})();

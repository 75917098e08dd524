// The page of a whole tree: pan, zoom, fold, search, and all that is known about each prototype.
//
// Reads #tree-data (see `tree_data`) and fills the elements of tree_body.html. Ids are as in the data: a node, or ~leaf.
// A node has one prototype, its own fields; where it chooses between two, those are the right one's, `other` has the left
// one's. For the browser app: selecting a node empties #node-extra and dispatches "prototree:select" on document with
// detail {node}, and {pair: true} for a choice; dispatching "prototree:show" with detail {node} opens that node.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("tree-data").textContent);
  const { slot, level: pitch, node: nodeSize, leaf: leafSize } = data.sizes;
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
  const named = (label, tag = "bdi") => make(tag, { text: name(label) });
  const fixed = (value) => (value === null ? "?" : value.toFixed(2));
  const choosing = data.question === "choice";
  const sidesOf = (id) => (choosing ? [nodeOf(id).other, nodeOf(id)] : [nodeOf(id)]); // left to right
  const short = (side) => (side.note ? `“${side.note}”` : `${side.prototype}`);
  const called = (id) => (choosing ? `${sidesOf(id).map(short).join(" or ")}?` : nodeOf(id).note || `Prototype ${id}`);
  const rather = (id, right) => { const [left, own] = sidesOf(id); return right ? [own, left] : [left, own]; };

  // What is said of a turn to the right or left at a node: at a line, and in a sentence.
  function turnWord(id, right) {
    if (choosing) return `more like ${rather(id, right)[0].prototype}`;
    return right ? "present" : "absent";
  }
  function turnWords(id, right) {
    if (choosing) return `rather ${rather(id, right).map(short).join(" than ")}`;
    return `${right ? "has" : "lacks"} ${called(id)}`;
  }
  const turnClass = (right) => (right || choosing ? "present" : "absent"); // a choice is no absence

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
    if (isLeaf(id)) return leafOf(id).unsure ? "no clear class" : name(leafOf(id).label);
    const labels = nodeOf(id).below;
    if (!labels.length) return "no clear class";
    if (labels.length === 1) return name(labels[0]);
    const shown = labels.length <= most + 1 ? labels : labels.slice(0, most);
    const more = labels.length - shown.length;
    return `${labels.length} classes: ${shown.map(name).join(", ")}${more ? ` and ${more} more` : ""}`;
  }

  // ---- where everything stands ----------------------------------------------------------------------------------

  const closed = new Set();
  let places = new Map();

  function arrange() { // the same arithmetic as report/layout.py, for what is not folded away
    const order = [], waiting = [[root, 0]];
    while (waiting.length) {
      const [id, level] = waiting.pop();
      order.push([id, level]);
      if (!isLeaf(id) && !closed.has(id)) waiting.push([nodeOf(id).right, level + 1], [nodeOf(id).left, level + 1]);
    }
    const x = new Map();
    for (const [id] of order) if (isLeaf(id) || closed.has(id)) x.set(id, x.size);
    for (const [id] of [...order].reverse()) if (!x.has(id)) x.set(id, (x.get(nodeOf(id).left) + x.get(nodeOf(id).right)) / 2);
    places = new Map(order.map(([id, level]) => [id, { x: x.get(id), level }]));
    drawn = null; // edges are drawn with the next view
    for (const [id, card] of mounted) if (!places.has(id)) unmount(id, card);
    for (const [id, card] of built) if (places.has(id)) dress(id, card);
    extent = measure();
  }

  const sizeOf = (id) => (isLeaf(id) ? leafSize : closed.has(id) ? [leafSize[0], nodeSize[1]] : nodeSize);

  function spotOf(id) {
    const place = places.get(id), [width, height] = sizeOf(id);
    return { x: (place.x + 0.5) * slot - width / 2, y: place.level * pitch, width, height, middle: (place.x + 0.5) * slot };
  }

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

  const lines = {};
  for (const kind of ["absent", "present", "absent on", "present on"]) lines[kind] = $("edges").appendChild(draw("path", { class: kind }));
  let trail = new Set();

  let drawn = null; // the part of the world whose edges are drawn: the view and as much again on each side

  function drawEdges() {
    const wide = Math.max(1000, map.clientWidth) / view.k, high = Math.max(700, map.clientHeight) / view.k, left = -view.x / view.k, top = -view.y / view.k;
    drawn = { left: left - wide, right: left + 2 * wide, top: top - high, bottom: top + 2 * high };
    const paths = { absent: "", present: "", "absent on": "", "present on": "" };
    for (const id of places.keys()) {
      const parent = parents.get(id);
      if (parent === null) continue;
      const from = spotOf(parent), to = spotOf(id);
      if (Math.min(from.middle, to.middle) > drawn.right || Math.max(from.middle, to.middle) < drawn.left || from.y > drawn.bottom || to.y < drawn.top) continue;
      const bottom = from.y + from.height, middle = bottom + 0.42 * (pitch - nodeSize[1]);
      const turn = Math.sign(to.middle - from.middle) * Math.min(10, Math.abs(to.middle - from.middle) / 2);
      const d = `M${from.middle} ${bottom}V${middle - 10}Q${from.middle} ${middle} ${from.middle + turn} ${middle}` +
        `H${to.middle - turn}Q${to.middle} ${middle} ${to.middle} ${middle + 10}V${to.y}`;
      paths[turnClass(isPresent(id)) + (trail.has(id) ? " on" : "")] += d;
    }
    for (const kind in lines) lines[kind].setAttribute("d", paths[kind]);
  }

  function highlight(ids) {
    trail = new Set(ids.flatMap(wayTo));
    map.classList.toggle("has-trail", trail.size > 0);
    drawEdges();
    for (const [id, card] of built) card.classList.toggle("on", trail.has(id));
  }

  // ---- cards ----------------------------------------------------------------------------------------------------

  const built = new Map(); // every card made so far
  const mounted = new Map(); // those near the view, which are in the document
  let current = root, selected = null;

  function photoWithBox(node, withLabel) {
    const frame = make("span", { class: "photo" }, make("img", { src: node.photo, alt: withLabel ? `Training photo of ${name(node.label)}` : "", draggable: "false", decoding: "async" }));
    frame.append(boxOver(node, node.where[0]));
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

  function bars(leaf) {
    const svg = draw("svg", { class: "bars", viewBox: "0 0 90 24", "aria-hidden": "true" });
    const step = 90 / data.classes.length, width = Math.max(2, 0.8 * step);
    const d = leaf.shares.map(([label, share]) => {
      const height = Math.max(1, 24 * share), x = (label + 0.5) * step - width / 2;
      return `M${x.toFixed(1)} 24v${-height.toFixed(1)}h${width.toFixed(1)}V24z`;
    });
    svg.append(draw("path", { class: "base", d: "M0 24H90" }), draw("path", { d: d.join("") }));
    return svg;
  }

  const cropOf = (side) => make("img", { class: "crop", src: side.crop, alt: "", draggable: "false", decoding: "async" });

  function duel(id) { // the two prototypes of a choice, each on the side it leads to
    return make("span", { class: "duel" }, ...sidesOf(id).map((side, right) => make("span", { class: "rival" }, cropOf(side),
      make("span", { class: "caption" }, right ? null : "←", make("b", { text: side.prototype }), make("bdi", { class: side.note ? "note" : "", text: side.note || name(side.label) }), right ? "→" : null))));
  }

  function build(id) {
    const card = make("div", { role: "treeitem", tabindex: id === current ? 0 : -1, "data-id": id, class: `card ${isLeaf(id) ? "leaf" : "node"}` });
    if (parents.get(id) !== null) {
      const right = isPresent(id);
      card.append(make("span", { class: `turn word ${turnClass(right)}`, text: turnWord(parents.get(id), right) }));
    }
    if (isLeaf(id)) {
      const leaf = leafOf(id);
      card.classList.toggle("unsure", leaf.unsure);
      card.append(bars(leaf), make("bdi", { class: "name", text: leaf.unsure ? "no clear class" : name(leaf.label) }), make("span", { class: "share", text: percent(leaf.share) }));
      card.setAttribute("aria-label", `${leaf.unsure ? "no clear class" : name(leaf.label)}, ${percent(leaf.share)}`);
    } else {
      if (choosing) card.append(duel(id));
      else {
        const node = nodeOf(id);
        card.append(
          make("span", { class: "pictures" }, cropOf(node), photoWithBox(node)),
          make("span", { class: "caption" }, make("b", { text: id }), " ", node.note ? "" : "from ", make("bdi", { class: node.note ? "note" : "", text: node.note || name(node.label) })),
        );
      }
      card.append(make("button", { type: "button", class: "fold", tabindex: -1 }));
    }
    dress(id, card);
    built.set(id, card);
    return card;
  }

  function dress(id, card) { // what changes: place, fold, selection
    const spot = spotOf(id);
    card.style.transform = `translate(${spot.x}px, ${spot.y}px)`;
    card.classList.toggle("on", trail.has(id));
    card.classList.toggle("selected", id === selected);
    card.setAttribute("aria-selected", id === selected);
    card.setAttribute("aria-level", places.get(id).level + 1);
    card.tabIndex = id === current ? 0 : -1;
    if (isLeaf(id)) return;
    const folded = closed.has(id), number = nodeOf(id).below.length, button = card.querySelector(".fold");
    card.classList.toggle("folded", folded);
    card.setAttribute("aria-expanded", !folded);
    const told = sidesOf(id).map((side) => `prototype ${side.prototype}${side.note ? `, ${side.note}` : ""}, from a photo of ${name(side.label)}`).join("; or more like ");
    card.setAttribute("aria-label", `${choosing ? "More like " : ""}${told}; below: ${belowWords(id)}`.replace(/^p/, "P"));
    button.textContent = folded ? `+ ${number}` : "–";
    const action = `${folded ? "Unfold" : "Fold"} ${number} ${number === 1 ? "class" : "classes"} below`;
    button.setAttribute("aria-label", action);
    button.title = action;
  }

  function unmount(id, card) {
    card.remove();
    mounted.delete(id);
  }

  // ---- view: what part of the world is seen ---------------------------------------------------------------------

  const view = { x: 0, y: 0, k: 1 };
  let frame = 0, flight = 0;

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
    map.dataset.detail = view.k < 0.34 ? "far" : "near";
    world.style.setProperty("--edge", `${1.2 / view.k}px`); // lines that are seen from any distance
    const margin = 200, width = map.clientWidth, height = map.clientHeight;
    const left = (-margin - view.x) / view.k, right = (width + margin - view.x) / view.k;
    const top = (-margin - view.y) / view.k, bottom = (height + margin - view.y) / view.k;
    const fresh = [];
    for (const id of places.keys()) {
      const spot = spotOf(id);
      const near = all || (spot.x < right && spot.x + spot.width > left && spot.y < bottom && spot.y + spot.height > top);
      if (near && !mounted.has(id)) {
        const card = built.get(id) || build(id);
        dress(id, card);
        mounted.set(id, card);
        fresh.push(card);
      } else if (!near && mounted.has(id) && id !== current) unmount(id, mounted.get(id));
    }
    if (fresh.length) cards.append(...fresh);
    if (!drawn || -view.x / view.k < drawn.left || -view.y / view.k < drawn.top || (width - view.x) / view.k > drawn.right || (height - view.y) / view.k > drawn.bottom) drawEdges();
    drawOverview();
  }

  const smallest = () => Math.min(0.3, 0.7 * fitFor(extent).k);

  function zoomAt(factor, x, y) {
    const k = Math.min(3, Math.max(smallest(), view.k * factor));
    view.x = x - (x - view.x) * (k / view.k);
    view.y = y - (y - view.y) * (k / view.k);
    view.k = k;
    show();
  }

  function fitFor(box, largest = 1) {
    const open = opening(), pad = narrow.matches ? 16 : 40;
    if (!narrow.matches) open.left += 36; // the zoom buttons
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

  function bringIntoView(id) {
    const spot = spotOf(id), open = opening(), k = Math.max(view.k, 0.7);
    const x = view.x + view.k * spot.x, y = view.y + view.k * spot.y;
    const seen = x > open.left + 8 && y > open.top + 24 && x + view.k * spot.width < open.right - 8 && y + view.k * spot.height < open.bottom - 24;
    if (seen && view.k >= 0.5) return;
    fly({ k, x: (open.left + open.right) / 2 - k * spot.middle, y: (open.top + open.bottom) / 2 - k * (spot.y + spot.height / 2) });
  }

  const fitAll = (quick) => fly(fitFor(extent), quick);

  function start() { // the whole tree where that is legible, else its top
    const fit = fitFor(extent);
    if (fit.k >= 0.34) return fitAll(true);
    const open = opening(), k = narrow.matches ? 0.5 : 0.62, spot = spotOf(root);
    const ends = measure([...places.keys()].filter((id) => places.get(id).level <= 2));
    const middle = (open.left + open.right) / 2;
    return fly({ k, x: middle - k * ((ends.left + ends.right) / 2 + spot.middle) / 2, y: 36 - k * spot.y }, true);
  }

  const pointers = new Map();
  let dragged = false;
  map.addEventListener("pointerdown", (event) => {
    if (event.target.closest(".zoom, .overview") || event.button > 0) return;
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
  for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, (event) => pointers.delete(event.pointerId));
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
    overview.hidden = all || narrow.matches;
    if (overview.hidden) return;
    const width = 220, high = Math.min(130, Math.max(50, (width * (extent.bottom - extent.top)) / (extent.right - extent.left)));
    const ratio = devicePixelRatio || 1, context = overview.getContext("2d");
    overview.width = width * ratio;
    overview.height = high * ratio;
    overview.style.width = `${width}px`;
    overview.style.height = `${high}px`;
    const k = Math.min((width - 12) / (extent.right - extent.left), (high - 12) / (extent.bottom - extent.top));
    const x0 = width / 2 - (k * (extent.left + extent.right)) / 2, y0 = high / 2 - (k * (extent.top + extent.bottom)) / 2;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(overview);
    context.strokeStyle = style.getPropertyValue("--line");
    context.fillStyle = style.getPropertyValue("--accent");
    context.lineWidth = 0.8;
    context.beginPath();
    for (const id of places.keys()) {
      const parent = parents.get(id);
      if (parent === null) continue;
      const from = spotOf(parent), to = spotOf(id), middle = y0 + k * (from.y + pitch / 2);
      context.moveTo(x0 + k * from.middle, y0 + k * from.y);
      context.lineTo(x0 + k * from.middle, middle);
      context.lineTo(x0 + k * to.middle, middle);
      context.lineTo(x0 + k * to.middle, y0 + k * to.y);
    }
    context.stroke();
    for (const id of trail) if (places.has(id)) context.fillRect(x0 + k * spotOf(id).middle - 1.5, y0 + k * spotOf(id).y - 1.5, 3, 3);
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
    arrange();
    const after = spotOf(id); // the card stays under the pointer
    view.x += view.k * (before.middle - after.middle);
    $("fold-all").textContent = closed.size ? "Unfold" : "Fold";
    showNow();
  }

  function reveal(id) { // unfold whatever hides it
    const hidden = wayTo(id).slice(0, -1).filter((above) => closed.has(above));
    if (!hidden.length) return;
    for (const above of hidden) closed.delete(above);
    $("fold-all").textContent = closed.size ? "Unfold" : "Fold";
    arrange();
  }

  $("fold-all").addEventListener("click", () => {
    if (closed.size) closed.clear();
    else for (const [id, place] of places) if (!isLeaf(id) && place.level === 3) closed.add(id);
    for (const above of wayTo(current)) if (closed.has(above)) { current = above; break; }
    $("fold-all").textContent = closed.size ? "Unfold" : "Fold";
    arrange();
    fitAll();
  });

  // ---- choosing -------------------------------------------------------------------------------------------------

  function goTo(id, focus = true) {
    reveal(id);
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
    reveal(id);
    openPanel(isLeaf(id) ? leafPanel(id) : nodePanel(id));
    highlight([id]);
    for (const one of [before, id]) if (one !== null && built.has(one) && places.has(one)) dress(one, built.get(one));
    if (!map.hidden) goTo(id, focus);
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
    show();
  }

  cards.addEventListener("click", (event) => {
    const card = event.target.closest(".card");
    if (!card || dragged) return;
    const id = Number(card.dataset.id);
    if (event.target.closest(".fold")) fold(id);
    else select(id);
  });
  cards.addEventListener("focusin", (event) => { // keys go on from the card that has the focus, however it got it
    const before = current, card = event.target.closest(".card");
    current = Number(card.dataset.id);
    for (const one of [before, current]) if (built.has(one)) built.get(one).tabIndex = one === current ? 0 : -1;
  });
  map.addEventListener("dblclick", (event) => {
    const box = map.getBoundingClientRect();
    if (!event.target.closest(".card, .zoom, .overview")) zoomAt(1.8, event.clientX - box.left, event.clientY - box.top);
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
    const frame = make("div", { class: "look" }, make("img", { src: node.photo, alt: `Training photo of ${name(node.label)}` }));
    const canvas = make("canvas", { class: "heat", "aria-hidden": "true" }), words = make("p", { class: "words" }), meaning = make("p", { class: "quiet" });
    frame.style.maxWidth = `${Math.round((300 * node.size[0]) / node.size[1])}px`; // tall photos stay on the screen
    frame.append(canvas);
    const buttons = make("div", { class: "group", role: "group", "aria-label": "Where the prototype is in the photo" });
    const heat = make("input", { type: "checkbox" });
    heat.checked = choice.heat;
    const update = () => {
      const where = node.where.find((one) => one.method === choice.method) || node.where[0];
      if (!where) return;
      frame.querySelector(".box")?.remove();
      frame.append(boxOver(node, where));
      canvas.hidden = !choice.heat;
      if (choice.heat) paintHeat(canvas, where.heat);
      words.textContent = where.words;
      meaning.textContent = where.meaning;
      for (const button of buttons.children) button.setAttribute("aria-pressed", button.dataset.method === where.method);
    };
    for (const where of node.where) buttons.append(make("button", { type: "button", "data-method": where.method, text: where.name, click: () => { choice.method = where.method; update(); } }));
    heat.addEventListener("change", () => { choice.heat = heat.checked; update(); });
    update();
    const switches = make("div", { class: "switches" }, node.where.length > 1 ? buttons : null, make("label", {}, heat, " heat map"));
    return make("section", { class: "where" }, make("div", { class: "pair" }, make("figure", { class: "piece" }, make("img", { src: node.crop, alt: "The prototype" }), make("figcaption", { text: "the prototype" })), frame), switches, meaning, words);
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
    const go = (child, right) => make("button", { type: "button", class: `lead ${turnClass(right)}`, click: () => select(child) },
      choosing ? cropOf(rather(id, right)[0]) : null,
      make("span", { class: `word ${turnClass(right)}`, text: turnWord(id, right) }), make("bdi", { text: belowWords(child) }));
    const ways = [go(nodeOf(id).right, true), go(nodeOf(id).left, false)];
    return section("Where it leads", "", make("div", { class: "leads" }, ...(choosing ? ways.reverse() : ways)));
  }

  function whoHasIt(node, side) {
    const below = new Set(node.below), all = side.right_share.map((share, label) => [label, share]);
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
    return section(choosing ? "Who goes this way" : "Who has it",
      choosing ? "How many of each class’s training photos come nearer to this prototype than to the other one." : "How many of each class’s training photos this prototype alone would send to “present”.",
      rows(first.map(entry)), more(`${rest.length} more classes below ${choosing ? "these two" : "this prototype"}`, rest), more(`${others.length} classes that do not come this far`, others));
  }

  function whyItMatches(node) {
    if (!node.causes.length) return null;
    const sorted = [...node.causes].sort((a, b) => a[1] - b[1]), max = Math.max(0.3, ...sorted.map(([, change]) => Math.abs(change ?? 0)));
    const entries = sorted.map(([word, change]) => [word, Math.max(0, -(change ?? 0)), change === null ? "?" : `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(2)}`]);
    return section("What makes it match", "How the similarity changes when one property of the photo is altered. A large fall: the property matters.", rows(entries, { max, tone: "warm" }));
  }

  function meansIt(side) {
    if (!side.tests.length) return null;
    return section("Does it mean what it shows?", "", ...side.tests.map((text) => make("p", { class: "words", text })));
  }

  function nearestTo(node) {
    if (!node.nearest.length) return null;
    const grid = make("ul", { class: "grid" });
    for (const match of node.nearest) grid.append(make("li", { title: match.image }, make("span", { class: "pictures" }, make("img", { class: "crop", src: match.crop, alt: "", loading: "lazy" }), photoWithBox(match)),
      named(match.label), make("span", { class: "value", text: `similarity ${fixed(match.similarity)}` })));
    return section("Most alike in other training photos", "The nearest pieces in the training photos, with their similarity to the prototype.", grid);
  }

  function nodePanel(id) {
    const node = nodeOf(id), way = section("The way here", "", wayView(id));
    if (!choosing) return [called(id), fromPhoto(node), lookAt(node), leadsTo(id), meansIt(node), nearestTo(node), whyItMatches(node), whoHasIt(node, node), way, origin(node)];
    const [left, right] = sidesOf(id).map((side, i) => make("section", { class: "of-two" },
      make("h2", {}, i ? "" : "← ", make("bdi", { text: side.note || `Prototype ${side.prototype}` }), i ? " →" : ""),
      ...[fromPhoto(side), lookAt(side), meansIt(side), nearestTo(side), whyItMatches(side), whoHasIt(node, side), origin(side)].filter((part) => part !== null)));
    return [
      called(id),
      make("p", { class: "quiet", text: `Node ${id} compares a photo with two prototypes and sends it to the side of the nearer one.` }),
      leadsTo(id), left, right, way,
    ];
  }

  function fromPhoto(side) {
    return make("p", { class: "quiet" }, side.note ? `Prototype ${side.prototype}. ` : "", side.projected ? "A piece of a training photo of " : "Nearest to it: a piece of a training photo of ", make("strong", {}, named(side.label)), ".");
  }

  function origin(side) {
    const reach = choosing && side.reach !== null ? ` Of the training photos of this side’s classes, 95 % come within a distance of ${fixed(side.reach)}, where the similarity is 0.5.` : "";
    return make("p", { class: "quiet small origin" }, "Photo: ", make("bdi", { text: side.image }), `. ${becoming(side)}${reach}`);
  }

  function becoming(side) {
    if (!side.projected) return "The prototype is not exactly this piece, which is only the nearest to it in the photos that are here.";
    return `At the end of training the prototype was moved by ${side.moved === null ? "?" : side.moved.toPrecision(2)} to become exactly this piece.`;
  }

  // ---- the panel of a leaf and of a class -----------------------------------------------------------------------

  function wayView(id) { // the turns on the way, in order
    const way = wayTo(id);
    if (way.length === 1) return make("p", { class: "quiet", text: "This is where every photo starts." });
    const list = make("ol", { class: "way" });
    for (let i = 0; i + 1 < way.length; i++) {
      const node = way[i], right = nodeOf(node).right === way[i + 1], words = turnWords(node, right);
      const [own, other] = choosing ? rather(node, right) : [nodeOf(node), null];
      list.append(make("li", { class: turnClass(right) },
        make("button", { type: "button", title: words, "aria-label": words, click: () => select(node) },
          make("img", { src: own.crop, alt: "", loading: "lazy" }), other ? make("img", { class: "than", src: other.crop, alt: "", loading: "lazy" }) : null,
          make("span", { class: "word", text: choosing ? `like ${own.prototype}` : `${right ? "has" : "lacks"} ${node}` }))));
    }
    return list;
  }

  function ruleView(id, label) {
    const leaf = leafOf(id), share = (leaf.shares.find(([k]) => k === label) || [0, 0])[1];
    const way = wayTo(id).slice(0, -1), turns = way.map((node, i) => [node, nodeOf(node).right === (way[i + 1] ?? id)]);
    const say = (list, word) => (list.length ? `${word} ${list.map(([node]) => (nodeOf(node).note ? `“${nodeOf(node).note}”` : node)).join(", ")}` : "");
    const text = choosing ? turns.map(([node, right]) => turnWords(node, right)).join(", ") : [say(turns.filter((t) => t[1]), "has"), say(turns.filter((t) => !t[1]), "lacks")].filter(Boolean).join("; ");
    return make("div", { class: "rule" }, wayView(id), make("p", {}, `${text || "always"} → `, make("button", { type: "button", class: "link", click: () => select(id) }, named(label, "strong")), ` ${percent(share)}`));
  }

  function leafPanel(id) {
    const leaf = leafOf(id), shares = [...leaf.shares].sort((a, b) => b[1] - a[1]).slice(0, 8);
    return [
      leaf.unsure ? "No clear class" : name(leaf.label),
      leaf.unsure ? make("p", { class: "quiet", text: "The training photos that arrive here are of many classes: this end says little." }) : null,
      section("How sure the tree is here", "", rows(shares.map(([label, share]) => [named(label), share, percent(share)]))),
      section("The rule that leads here", "", ruleView(id, leaf.label)),
    ];
  }

  function showClass(label) {
    const order = [...data.leaves].map((leaf) => [~leaf.id, leaf, (leaf.shares.find(([k]) => k === label) || [0, 0])[1]]);
    const own = order.filter(([, leaf]) => leaf.label === label && !leaf.unsure).sort((a, b) => b[2] - a[2]);
    const some = own.length ? own : order.sort((a, b) => b[2] - a[2]).slice(0, 3).filter(([, , share]) => share > 0);
    const before = selected;
    selected = null;
    if (before !== null && built.has(before) && places.has(before)) dress(before, built.get(before));
    const hint = own.length ? (own.length === 1 ? "One rule leads to this class." : `${own.length} rules lead to this class.`) : "No end of the tree is for this class. It is most likely here:";
    openPanel([name(label), make("p", { class: "quiet", text: hint }), ...some.map(([id]) => make("section", {}, ruleView(id, label)))]);
    some.forEach(([id]) => reveal(id));
    highlight(some.map(([id]) => id));
    if (!map.hidden && some.length) {
      if (some.length === 1) {
        current = some[0][0];
        const way = measure(wayTo(current)), fit = fitFor(way, 0.9);
        if (fit.k >= 0.4) fly(fit);
        else goTo(current, false);
        showNow();
      } else fly(fitFor(measure(some.flatMap(([id]) => wayTo(id))), 0.9));
    }
  }

  // ---- finding a class ------------------------------------------------------------------------------------------

  const query = $("query"), found = $("found");
  const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  const spelled = data.classes.map(folded);
  let at = -1;

  function listFound() {
    const wanted = folded(query.value.trim());
    const labels = spelled.map((text, label) => [text.indexOf(wanted), label]).filter(([where]) => where >= 0);
    if (wanted) labels.sort((a, b) => (a[0] > 0) - (b[0] > 0) || spelled[a[1]].localeCompare(spelled[b[1]]));
    const shown = labels.slice(0, 60);
    found.replaceChildren(...shown.map(([, label], i) => make("li", { role: "option", id: `found-${i}`, "data-label": label, "aria-selected": "false" }, named(label))));
    if (!shown.length) found.append(make("li", { class: "none", text: "no class of this name" }));
    if (labels.length > shown.length) found.append(make("li", { class: "none", text: `and ${labels.length - shown.length} more` }));
    at = -1;
    if (wanted && shown.length) mark(0);
    openFound(true);
  }

  function openFound(open) {
    found.hidden = !open;
    query.setAttribute("aria-expanded", open);
    if (!open) query.removeAttribute("aria-activedescendant");
  }

  function mark(i) {
    const options = found.querySelectorAll("[role=option]");
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
    const option = found.querySelector("[aria-selected=true]") || found.querySelector("[role=option]");
    if (option && !found.hidden) take(option);
  });
  found.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // keep the focus until the choice is made
    const option = event.target.closest("[role=option]");
    if (option) take(option);
  });

  // ---- the tree as a list ---------------------------------------------------------------------------------------

  const key = $("key");
  function buildKey() {
    if (key.childElementCount) return;
    key.append(make("p", { class: "quiet", text: choosing
      ? "Begin at the first card. Compare the photo with both pieces and go on at the one that something in the photo is more like, until you arrive at a class."
      : "Begin at the first card. If you find its piece in the photo, take “present”, else “absent”, until you arrive at a class." }));
    const list = make("ol", { class: "couplets" }), open = [root], order = [];
    while (open.length) {
      const id = open.pop();
      if (isLeaf(id)) continue;
      order.push(id);
      open.push(nodeOf(id).left, nodeOf(id).right);
    }
    for (const id of order) {
      const node = nodeOf(id);
      const target = (child) => (isLeaf(child)
        ? make("button", { type: "button", class: "link", click: () => select(child) }, make("bdi", { class: leafOf(child).unsure ? "quiet" : "end", text: belowWords(child) }))
        : make("a", { href: `#key-${child}`, class: "link" }, make("b", { text: `→ ${child}` }), " ", make("bdi", { class: "quiet", text: belowWords(child, 2) })));
      const line = (child, right) => make("p", { class: "turn-line" }, make("span", { class: `word ${turnClass(right)}`, text: turnWord(id, right) }), target(child));
      if (choosing) {
        const half = (side, right) => make("div", { class: "half" },
          make("button", { type: "button", class: "pictures", "aria-label": `Details of prototype ${side.prototype}`, click: () => select(id) }, make("img", { class: "crop", src: side.crop, alt: "", loading: "lazy" }), photoWithBox(side, true)),
          make("p", { class: "turn-line" }, make("span", { class: "word present", text: turnWord(id, right) }), side.note ? make("bdi", { class: "note", text: side.note }) : make("bdi", { class: "quiet", text: `from ${name(side.label)}` })),
          make("p", { class: "turn-line" }, target(right ? node.right : node.left)));
        list.append(make("li", { id: `key-${id}`, class: "couplet pair-of" }, make("h3", {}, make("b", { text: id })), ...sidesOf(id).map((side, i) => half(side, i === 1))));
        continue;
      }
      list.append(make("li", { id: `key-${id}`, class: "couplet" },
        make("button", { type: "button", class: "pictures", "aria-label": `Details of prototype ${id}`, click: () => select(id) },
          make("img", { class: "crop", src: node.crop, alt: "", loading: "lazy" }), photoWithBox(node, true)),
        make("div", {}, make("h3", {}, make("b", { text: id }), " ", node.note ? "" : make("span", { class: "quiet", text: "from " }), make("bdi", { class: node.note ? "note" : "quiet", text: node.note || name(node.label) })), line(node.right, true), line(node.left, false))));
    }
    key.append(list);
    if (!order.length) key.append(make("p", { text: `Every photo is taken for ${belowWords(root)}.` }));
  }

  function present(asList) {
    if (asList) buildKey();
    key.hidden = !asList;
    map.hidden = asList;
    $("show-key").setAttribute("aria-pressed", asList);
    $("show-map").setAttribute("aria-pressed", !asList);
    document.body.classList.toggle("as-list", asList);
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
  $("help-open").addEventListener("click", () => $("help").showModal());

  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    drawOverview();
  });

  const acts = {
    "/": () => query.focus(),
    "+": () => zoomMiddle(1.5),
    "=": () => zoomMiddle(1.5),
    "-": () => zoomMiddle(1 / 1.5),
    "−": () => zoomMiddle(1 / 1.5),
    0: () => fitAll(),
    "?": () => $("help").showModal(),
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
      select(current);
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
    const k = Math.min(1, wide / (extent.right - extent.left), high / (extent.bottom - extent.top));
    Object.assign(view, { k, x: -k * extent.left + (wide - k * (extent.right - extent.left)) / 2, y: 4 - k * extent.top });
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
    for (const id of waiting.splice(0, 12)) if (places.has(id) && !built.has(id)) build(id);
    if (waiting.length) (window.requestIdleCallback || setTimeout)(() => buildAhead(waiting));
  }
  addEventListener("resize", () => { if (!map.hidden) show(); });
  arrange();
  if (location.hash.startsWith("#key") || narrow.matches) present(true);
  else begin();
})();

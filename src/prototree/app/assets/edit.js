// Editing: every change names the revision it is based on; the answer has the metrics of the tree.
"use strict";
(() => {
  const { make, say, ask, post } = prototree;
  const $ = (id) => document.getElementById(id);
  const section = $("edit-node"), node = section ? Number(section.dataset.node) : null; // its number, from 1
  let state = null, changing = false, side = "right"; // side: which prototype is edited, where a node has two
  const busy = (id, is) => { if ($(id)) $(id).setAttribute("aria-busy", String(is)); };

  // ---- state ----------------------------------------------------------------------------------------------------

  const percent = (fraction) => `${(100 * fraction).toFixed(1)} %`;
  const ROWS = [
    ["accuracy (single path)", (m) => m.accuracy.greedy, percent, 1],
    ["all paths averaged", (m) => m.accuracy.soft, percent, 1],
    ["most likely path", (m) => m.accuracy.max_path, percent, 1],
    ["fidelity, most likely path", (m) => m.fidelity.max_path, percent, 1],
    ["fidelity, single path", (m) => m.fidelity.greedy, percent, 1],
    ["questions on a path", (m) => m.path_length.max_path, (x) => x.toFixed(2), 0],
    ["prototypes", (m) => m.n_prototypes, String, 0],
  ];

  function render() {
    const columns = [["initial", state.initial], ["previous", state.previous], ["current", state.current]];
    const table = (id, rows) => $(id).replaceChildren(
      make("thead", {}, make("tr", {}, make("td"), ...columns.map(([name]) => make("th", { scope: "col", text: name })))),
      make("tbody", {}, ...rows.map(([name, value, text, sign]) => make("tr", {}, make("th", { scope: "row", text: name }),
        ...columns.map(([, metrics], i) => {
          const change = i === 2 ? sign * Math.sign(value(metrics) - value(state.previous)) : 0;
          return make("td", { class: change > 0 ? "better" : change < 0 ? "worse" : null, text: text(value(metrics)) });
        })))));
    table("metrics", ROWS.slice(0, 1));
    table("more-metrics", ROWS.slice(1));
    $("changed-count").textContent = state.changed.length ? `· ${state.changed.length}` : "· none";
    $("changed").replaceChildren(...state.changed.map((changed) => make("li", { title: changed.image.name },
      make("img", { src: changed.image.thumb, alt: "", loading: "lazy" }),
      make("span", { class: changed.current === changed.label ? "word present" : "word", text: changed.current === changed.label ? "now right" : changed.previous === changed.label ? "now wrong" : "still wrong" }),
      make("br"), make("bdi", { text: changed.previous }), " → ", make("b", {}, make("bdi", { text: changed.current })))));
    const lost = state.lost_classes;
    $("lost-classes").hidden = !lost.length;
    $("lost-classes").replaceChildren(`${lost.length} ${lost.length === 1 ? "class has" : "classes have"} no leaf any more: `, ...lost.flatMap((name, i) => [i ? ", " : "", make("bdi", { text: name })]));
    $("history").replaceChildren(...state.done.map((text) => make("li", { text })), ...state.undone.map((text) => make("li", { class: "undone", text })));
    if (!state.done.length && !state.undone.length) $("history").replaceChildren(make("li", { class: "quiet none", text: "Nothing changed yet." }));
    $("undo").disabled = !state.done.length;
    $("redo").disabled = !state.undone.length;
    if ($("finetune")) $("finetune").disabled = !state.done.length || $("finetune-state").dataset.state === "running";
    document.documentElement.dataset.revision = state.revision;
  }

  async function refresh() {
    state = await ask("/api/edits");
    render();
  }

  async function change(path, content, text) {
    if (changing || !state) return false;
    changing = true;
    say("Refitting the leaves …");
    busy("candidates", true); // what is listed may not be so any more
    try {
      const before = state.n_nodes;
      state = await post(path, { revision: state.revision, ...content });
      render();
      const count = state.changed.length;
      say(`${text} Accuracy (single path): ${percent(state.previous.accuracy.greedy)} → ${percent(state.current.accuracy.greedy)}; ${count === 1 ? "1 image is" : `${count || "no"} images are`} predicted differently.`);
      if (state.n_nodes !== before) location.assign("/edit"); // the numbers of nodes have moved
      return true;
    } catch (error) {
      say(error.status === 409 ? "Somebody else has changed the tree in the meantime. This is how it is now; look again, then repeat your change." : error.message, true);
      if (error.status === 409) await refresh();
      busy("candidates", false);
      return false;
    } finally {
      changing = false;
    }
  }

  const edit = (content, text) => change("/api/edits", { edit: content }, text);
  const again = () => { if (node !== null && node <= state.n_nodes) return renew(); return null; };
  $("undo").addEventListener("click", async () => { if (await change("/api/edits/undo", {}, "Undone.")) await again(); });
  $("redo").addEventListener("click", async () => { if (await change("/api/edits/redo", {}, "Redone.")) await again(); });
  $("save").addEventListener("click", async () => {
    if (changing || !state) return;
    changing = true;
    say("Saving, and testing the tree on held-out images …");
    try {
      const saved = await post("/api/edits/save", { revision: state.revision });
      say(`Saved as “${saved.run}”. On ${saved.images}: accuracy ${percent(saved.before.greedy)} before editing, ${percent(saved.after.greedy)} now. To see what has changed: ${saved.comparison}`);
    } catch (error) {
      say(error.message, true);
    } finally {
      changing = false;
    }
  });

  // ---- fine-tuning ----------------------------------------------------------------------------------------------

  function showFinetuning(job) {
    const minutes = `${Math.floor(job.seconds / 60)}:${String(job.seconds % 60).padStart(2, "0")}`;
    const text = {
      running: () => `Training for ${minutes} min … ${job.last_log_line}`,
      failed: () => `It did not work: ${job.last_log_line}`,
      done: () => `Done in ${minutes} min. Opening “${job.run}” …`,
      opened: () => `This is “${job.run}”, trained in ${minutes} min. On ${job.images}, by the single path: accuracy ${percent(job.initial)} before editing, ${percent(job.edited)} edited, ${percent(job.finetuned)} retrained.`,
    }[job.state];
    if (text) $("finetune-state").textContent = text();
    $("finetune-state").dataset.state = job.state;
    $("finetune-state").classList.toggle("quiet", job.state === "idle");
    $("finetune").disabled = job.state === "running" || !state?.done.length;
    if (job.state === "running") setTimeout(askFinetuning, 1000);
    if (job.state === "done") openFinetuned();
  }
  async function openFinetuned() { // the page goes on with the new run
    try {
      await post("/api/finetune/open", {});
      location.reload();
    } catch (error) {
      say(`${error.message}; the new run can be opened with: prototree serve`, true);
    }
  }
  const askFinetuning = () => fetch("/api/finetune").then((answer) => (answer.ok ? answer.json() : Promise.reject())).then(showFinetuning).catch(() => setTimeout(askFinetuning, 5000));
  if ($("finetune")) $("finetune").addEventListener("click", async () => {
    if (changing || !state) return;
    $("finetune").disabled = true;
    try {
      showFinetuning(await post("/api/finetune", { revision: state.revision }));
    } catch (error) {
      say(error.message, true);
      await refresh(); // somebody else may have changed the tree meanwhile
    }
  });

  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    $(event.shiftKey ? "redo" : "undo").click();
  });

  // ---- one node -------------------------------------------------------------------------------------------------

  async function renew() { // the parts of the page that the server filled, as they are now
    const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    for (const old of section.querySelectorAll("[data-renew]")) {
      const now = page.querySelector(`#edit-node [data-renew="${old.dataset.renew}"]`);
      if (now) old.replaceWith(document.importNode(now, true));
    }
    await loadCandidates();
  }

  function framed(patch) { // as in templates/patch.html
    const holder = document.createElement("span"), [left, top, right, bottom] = patch.frame;
    holder.className = "patch";
    holder.innerHTML = '<img alt="" loading="lazy"><svg class="box" viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true"><rect class="under"/><rect class="over"/></svg>';
    holder.firstChild.src = patch.context;
    for (const rect of holder.querySelectorAll("rect")) for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top })) rect.setAttribute(key, value);
    return holder;
  }

  async function loadCandidates() {
    const list = $("candidates"), requested = side;
    busy("candidates", true);
    const candidates = await ask(`/api/nodes/${node}/candidates?count=12&side=${requested}`);
    if (requested !== side) return; // the other one was chosen meanwhile
    list.replaceChildren(...candidates.map((candidate) => make("li", { title: candidate.image.name },
      framed(candidate),
      make("span", { class: "small quiet", text: `similarity ${candidate.similarity.toFixed(2)}` }),
      make("span", { class: "actions" },
        make("button", { type: "button", text: "Use", click: async () => { if (await edit({ edit: "replace", node, side: requested, image: candidate.image.index, view: candidate.view, patch: candidate.patch }, "Replaced.")) await renew(); } }),
        make("button", { type: "button", text: "Exclude", click: async () => { if (await edit({ edit: "exclude", image: candidate.image.index, region: candidate.box }, "Excluded as a source.")) await renew(); } }),
        make("button", { type: "button", text: "Image", title: "Open this image below", click: () => openImage(candidate.image.index) })))));
    busy("candidates", false);
  }

  const COUNT = 12;
  let start = 0, image = null, cell = null;

  async function loadImages() {
    const query = `label=${$("label").value}&start=${start}`;
    busy("images", true);
    const images = await ask(`/api/images/training?${query}&count=${COUNT + 1}`);
    if (query !== `label=${$("label").value}&start=${start}`) return; // another class was chosen meanwhile
    $("earlier").disabled = start === 0;
    $("later").disabled = images.length <= COUNT;
    $("images").replaceChildren(...images.slice(0, COUNT).map((item) => make("li", {}, make("button", { type: "button", class: "thumb", "data-image": item.index, title: item.name, click: () => openImage(item.index) }, make("img", { src: item.thumb, alt: item.name })))));
    busy("images", false);
  }

  async function openImage(index) {
    image = await ask(`/api/images/training/${index}`);
    $("stage-image").src = image.picture;
    $("stage-image").alt = image.name;
    $("stage-box").setAttribute("viewBox", `0 0 ${image.width} ${image.height}`);
    $("picker").hidden = false;
    for (const button of document.querySelectorAll("#images .thumb")) button.classList.toggle("chosen", Number(button.dataset.image) === index);
    drawGrid();
    mark(null, null);
    $("picker").scrollIntoView({ block: "nearest" });
  }

  function drawGrid() { // before anything is dragged: what the network sees the image in
    const { grid } = image, right = grid.left + grid.columns * grid.cell_width, bottom = grid.top + grid.rows * grid.cell_height;
    let path = "";
    for (let i = 0; i <= grid.columns; i++) path += `M${grid.left + i * grid.cell_width} ${grid.top}V${bottom}`;
    for (let i = 0; i <= grid.rows; i++) path += `M${grid.left} ${grid.top + i * grid.cell_height}H${right}`;
    for (const lines of $("stage-box").querySelectorAll("path")) lines.setAttribute("d", path);
  }

  const boxOf = ([row, column]) => { const { grid } = image; return [grid.left + column * grid.cell_width, grid.top + row * grid.cell_height, grid.left + (column + grid.patch_columns) * grid.cell_width, grid.top + (row + grid.patch_rows) * grid.cell_height]; };

  function placeRect(name, box) {
    for (const rect of $("stage-box").querySelectorAll(name)) {
      const [left, top, right, bottom] = box || [0, 0, 0, 0];
      for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top })) rect.setAttribute(key, value);
    }
  }

  function mark(region, at) { // region: what was dragged; at: [row, column] of the patch
    cell = at && { patch: at, region, box: boxOf(at) };
    placeRect(".hover", null);
    placeRect(".drag", region);
    placeRect(".under, .over", cell && cell.box);
    $("use-patch").disabled = $("exclude-region").disabled = !cell;
  }

  const clamp = (value, high) => Math.round(Math.min(Math.max(value, 0), high));
  function nearest([left, top, right, bottom]) { // the server's rule: the patch whose middle is nearest to the region's
    const { grid } = image;
    return [clamp(((top + bottom) / 2 - grid.top) / grid.cell_height - grid.patch_rows / 2, grid.rows - grid.patch_rows),
      clamp(((left + right) / 2 - grid.left) / grid.cell_width - grid.patch_columns / 2, grid.columns - grid.patch_columns)];
  }

  function setUpStage() {
    const stage = $("stage");
    let from = null;
    const point = (event) => {
      const frame = $("stage-image").getBoundingClientRect();
      return [Math.min(Math.max((event.clientX - frame.left) / frame.width, 0), 1) * image.width, Math.min(Math.max((event.clientY - frame.top) / frame.height, 0), 1) * image.height];
    };
    const drag = (event) => {
      const [x, y] = point(event), region = [Math.min(x, from[0]), Math.min(y, from[1]), Math.max(x, from[0]), Math.max(y, from[1])];
      mark(region, nearest(region));
    };
    stage.addEventListener("pointerdown", (event) => { event.preventDefault(); stage.focus(); stage.setPointerCapture(event.pointerId); from = point(event); drag(event); });
    stage.addEventListener("pointermove", (event) => {
      if (from) { drag(event); return; }
      const [x, y] = point(event);
      placeRect(".hover", boxOf(nearest([x, y, x, y]))); // what a click here would take
    });
    stage.addEventListener("pointerleave", () => { if (image) placeRect(".hover", null); });
    stage.addEventListener("pointerup", () => { from = null; });
    stage.addEventListener("pointercancel", () => { from = null; });
    stage.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const { grid } = image, at = cell ? cell.patch : [Math.floor(grid.rows / 2), Math.floor(grid.columns / 2)];
      mark(null, [clamp(at[0] + step[0], grid.rows - grid.patch_rows), clamp(at[1] + step[1], grid.columns - grid.patch_columns)]);
    });
  }

  function chooseSide(button) {
    side = button.dataset.side;
    for (const other of document.querySelectorAll(".choose-side")) other.setAttribute("aria-pressed", String(other === button));
    for (const name of document.querySelectorAll(".side-name")) name.textContent = `${node}${side[0].toUpperCase()}`;
    $("label").value = button.dataset.label;
    start = 0;
    Promise.all([loadCandidates(), loadImages()]).catch((error) => say(error.message, true));
  }

  function setUpNode() {
    for (const button of document.querySelectorAll(".choose-side")) button.addEventListener("click", () => chooseSide(button));
    section.addEventListener("click", (event) => {
      const suggestion = event.target.closest("button.suggestion"), field = suggestion && suggestion.closest("form").querySelector("input");
      if (field) { field.value = suggestion.textContent; field.focus(); }
    });
    section.addEventListener("submit", async (event) => {
      const form = event.target.closest(".name-form");
      if (!form) return;
      event.preventDefault();
      if (await edit({ edit: "note", node, side: form.dataset.side, text: form.querySelector("input").value }, "Named.")) await renew();
    });
    $("label").addEventListener("change", () => { start = 0; loadImages().catch((error) => say(error.message, true)); });
    $("earlier").addEventListener("click", () => { start = Math.max(0, start - COUNT); loadImages(); });
    $("later").addEventListener("click", () => { start += COUNT; loadImages(); });
    $("class-form").addEventListener("submit", (event) => event.preventDefault());
    $("use-patch").addEventListener("click", async () => { if (await edit({ edit: "replace", node, side, image: image.index, patch: cell.patch }, "Replaced.")) await renew(); });
    $("exclude-region").addEventListener("click", async () => { if (await edit({ edit: "exclude", image: image.index, region: cell.region || cell.box }, "Excluded as a source.")) await renew(); });
    $("exclude-image").addEventListener("click", async () => { if (await edit({ edit: "exclude", image: image.index }, "Excluded as a source.")) await renew(); });
    for (const button of document.querySelectorAll("button.remove")) button.addEventListener("click", () => edit({ edit: "remove", node, keep: button.dataset.keep }, "Removed."));
    setUpStage();
    return Promise.all([loadCandidates(), loadImages()]);
  }

  Promise.all([refresh().then(() => ($("finetune") ? askFinetuning() : null)), node === null ? null : setUpNode()]).then(() => { document.documentElement.dataset.ready = "yes"; }).catch((error) => say(error.message, true));
})();

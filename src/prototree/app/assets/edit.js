// Editing: every change names the revision it was decided on; the answer says how the tree does now.
"use strict";
(() => {
  const { make, say, ask, post } = prototree;
  const $ = (id) => document.getElementById(id);
  const place = $("edit-node"), node = place ? Number(place.dataset.node) : null;
  let standing = null, changing = false, side = "right"; // side: which prototype is edited, where a node has two
  const busy = (id, is) => { if ($(id)) $(id).setAttribute("aria-busy", String(is)); };

  // ---- where it stands ------------------------------------------------------------------------------------------

  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const ROWS = [
    ["right, single path", (f) => f.accuracy.greedy, percent, 1],
    ["right, all paths averaged", (f) => f.accuracy.soft, percent, 1],
    ["right, most likely path", (f) => f.accuracy.max_path, percent, 1],
    ["fidelity, most likely path", (f) => f.fidelity.max_path, percent, 1],
    ["fidelity, greedy path", (f) => f.fidelity.greedy, percent, 1],
    ["questions asked", (f) => f.path_length.max_path, (x) => x.toFixed(2), 0],
    ["prototypes in all", (f) => f.prototypes, String, 0],
  ];

  function render() {
    const columns = [["original", standing.original], ["before", standing.before], ["now", standing.now]];
    $("figures").replaceChildren(
      make("thead", {}, make("tr", {}, make("td"), ...columns.map(([name]) => make("th", { scope: "col", text: name })))),
      make("tbody", {}, ...ROWS.map(([name, value, words, sign]) => make("tr", {}, make("th", { scope: "row", text: name }),
        ...columns.map(([, figures], i) => {
          const change = i === 2 ? sign * Math.sign(value(figures) - value(standing.before)) : 0;
          return make("td", { class: change > 0 ? "better" : change < 0 ? "worse" : null, text: words(value(figures)) });
        })))));
    $("changed-count").textContent = standing.changed.length ? `· ${standing.changed.length}` : "· none";
    $("changed").replaceChildren(...standing.changed.map((changed) => make("li", { title: changed.photo.name },
      make("img", { src: changed.photo.thumb, alt: "", loading: "lazy" }),
      make("span", { class: changed.after === changed.truth ? "word present" : "word", text: changed.after === changed.truth ? "now right" : changed.before === changed.truth ? "now wrong" : "still wrong" }),
      make("br"), make("bdi", { text: changed.before }), " → ", make("b", {}, make("bdi", { text: changed.after })))));
    $("history").replaceChildren(...standing.done.map((text) => make("li", { text })), ...standing.undone.map((text) => make("li", { class: "undone", text })));
    if (!standing.done.length && !standing.undone.length) $("history").replaceChildren(make("li", { class: "quiet", text: "Nothing changed yet." }));
    $("undo").disabled = !standing.done.length;
    $("redo").disabled = !standing.undone.length;
    if ($("learn")) $("learn").disabled = !standing.done.length || $("learning").dataset.state === "learning";
    document.documentElement.dataset.revision = standing.revision;
  }

  async function refresh() {
    standing = await ask("/api/edits");
    render();
  }

  async function change(path, content, words) {
    if (changing || !standing) return false;
    changing = true;
    say("Refitting the leaves …");
    busy("candidates", true); // what is listed may not be so any more
    try {
      const before = standing.nodes.length;
      standing = await post(path, { revision: standing.revision, ...content });
      render();
      const count = standing.changed.length;
      say(`${words} Right: ${percent(standing.before.accuracy.greedy)} → ${percent(standing.now.accuracy.greedy)}; ${count === 1 ? "1 photo is" : `${count || "no"} photos are`} answered differently.`);
      if (standing.nodes.length !== before) location.assign("/edit"); // the numbers of prototypes have moved
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

  const edit = (content, words) => change("/api/edits", { edit: content }, words);
  const again = () => { if (node !== null && node < standing.nodes.length) return renew(); return null; };
  $("undo").addEventListener("click", async () => { if (await change("/api/edits/undo", {}, "Undone.")) await again(); });
  $("redo").addEventListener("click", async () => { if (await change("/api/edits/redo", {}, "Redone.")) await again(); });
  $("save").addEventListener("click", async () => {
    if (changing || !standing) return;
    changing = true;
    say("Saving, and testing the tree on photos that were kept back …");
    try {
      const saved = await post("/api/edits/save", { revision: standing.revision });
      say(`Saved as “${saved.run}”. On ${saved.photos}: ${percent(saved.before.greedy)} right before editing, ${percent(saved.after.greedy)} now.`);
    } catch (error) {
      say(error.message, true);
    } finally {
      changing = false;
    }
  });

  // ---- learning on ----------------------------------------------------------------------------------------------

  function showLearning(job) {
    const minutes = `${Math.floor(job.seconds / 60)}:${String(job.seconds % 60).padStart(2, "0")}`;
    const words = {
      learning: () => `Learning for ${minutes} min … ${job.says}`,
      failed: () => `It did not work: ${job.says}`,
      done: () => `Done in ${minutes} min. Opening “${job.run}” …`,
      opened: () => `This is “${job.run}”, learned in ${minutes} min. On ${job.photos}, by the greedy path: ${percent(job.original)} right before editing, ${percent(job.edited)} edited, ${percent(job.learned)} after learning.`,
    }[job.state];
    if (words) $("learning").textContent = words();
    $("learning").dataset.state = job.state;
    $("learning").classList.toggle("quiet", job.state === "idle");
    $("learn").disabled = job.state === "learning" || !standing?.done.length;
    if (job.state === "learning") setTimeout(askLearning, 1000);
    if (job.state === "done") openLearned();
  }
  async function openLearned() { // the page goes on with the new run
    try {
      await post("/api/finetune/open", {});
      location.reload();
    } catch (error) {
      say(`${error.message}; the new run can be opened with: prototree serve`, true);
    }
  }
  const askLearning = () => fetch("/api/finetune").then((answer) => (answer.ok ? answer.json() : Promise.reject())).then(showLearning).catch(() => setTimeout(askLearning, 5000));
  if ($("learn")) $("learn").addEventListener("click", async () => {
    if (changing || !standing) return;
    $("learn").disabled = true;
    try {
      showLearning(await post("/api/finetune", { revision: standing.revision }));
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

  // ---- one prototype --------------------------------------------------------------------------------------------

  async function renew() { // the parts of the page that the server filled, as they are now
    const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    for (const old of place.querySelectorAll("[data-renew]")) {
      const now = page.querySelector(`#edit-node [data-renew="${old.dataset.renew}"]`);
      if (now) old.replaceWith(document.importNode(now, true));
    }
    $("note").value = page.getElementById("note").value;
    await loadCandidates();
  }

  function framed(patch) { // as in templates/patch.html
    const holder = document.createElement("span"), [left, top, right, bottom] = patch.frame;
    holder.className = "patch";
    holder.innerHTML = '<img alt="" loading="lazy"><svg class="box" viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true"><rect class="under"/><rect class="over"/></svg>';
    holder.firstChild.src = patch.around;
    for (const rect of holder.querySelectorAll("rect")) for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top })) rect.setAttribute(key, value);
    return holder;
  }

  async function loadCandidates() {
    const list = $("candidates"), wanted = side;
    busy("candidates", true);
    const found = await ask(`/api/nodes/${node}/candidates?count=12&side=${wanted}`);
    if (wanted !== side) return; // the other one was chosen meanwhile
    list.replaceChildren(...found.candidates.map((candidate) => make("li", { title: candidate.photo.name },
      framed(candidate),
      make("span", { class: "small quiet", text: `similarity ${candidate.similarity.toFixed(2)}` }),
      make("span", { class: "actions" },
        make("button", { type: "button", text: "Use", click: async () => { if (await edit({ edit: "replace", node, side: wanted, photo: candidate.photo.index, view: candidate.view, patch: candidate.patch }, "Replaced.")) await renew(); } }),
        make("button", { type: "button", text: "Exclude", click: async () => { if (await edit({ edit: "exclude", photo: candidate.photo.index, region: candidate.box }, "Excluded as a source.")) await renew(); } }),
        make("button", { type: "button", text: "Photo", title: "Open this photo below", click: () => openPhoto(candidate.photo.index) })))));
    busy("candidates", false);
  }

  const COUNT = 12;
  let start = 0, photo = null, cell = null;

  async function loadPhotos() {
    const wanted = `label=${$("label").value}&start=${start}`;
    busy("photos", true);
    const found = await ask(`/api/photos/training?${wanted}&count=${COUNT + 1}`);
    if (wanted !== `label=${$("label").value}&start=${start}`) return; // another class was chosen meanwhile
    $("earlier").disabled = start === 0;
    $("later").disabled = found.length <= COUNT;
    $("photos").replaceChildren(...found.slice(0, COUNT).map((one) => make("li", {}, make("button", { type: "button", class: "thumb", "data-photo": one.index, title: one.name, click: () => openPhoto(one.index) }, make("img", { src: one.thumb, alt: one.name })))));
    busy("photos", false);
  }

  async function openPhoto(index) {
    photo = await ask(`/api/photos/training/${index}`);
    $("stage-photo").src = photo.picture;
    $("stage-photo").alt = photo.name;
    $("stage-box").setAttribute("viewBox", `0 0 ${photo.width} ${photo.height}`);
    $("picker").hidden = false;
    for (const button of document.querySelectorAll("#photos .thumb")) button.classList.toggle("chosen", Number(button.dataset.photo) === index);
    drawGrid();
    mark(null, null);
    $("picker").scrollIntoView({ block: "nearest" });
  }

  function drawGrid() { // before anything is dragged: what the network sees the photo in
    const { grid } = photo, right = grid.left + grid.columns * grid.across, bottom = grid.top + grid.rows * grid.down;
    let path = "";
    for (let i = 0; i <= grid.columns; i++) path += `M${grid.left + i * grid.across} ${grid.top}V${bottom}`;
    for (let i = 0; i <= grid.rows; i++) path += `M${grid.left} ${grid.top + i * grid.down}H${right}`;
    for (const lines of $("stage-box").querySelectorAll("path")) lines.setAttribute("d", path);
  }

  const boxOf = ([row, column]) => { const { grid } = photo; return [grid.left + column * grid.across, grid.top + row * grid.down, grid.left + (column + grid.patch_columns) * grid.across, grid.top + (row + grid.patch_rows) * grid.down]; };

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
    const { grid } = photo;
    return [clamp(((top + bottom) / 2 - grid.top) / grid.down - grid.patch_rows / 2, grid.rows - grid.patch_rows),
      clamp(((left + right) / 2 - grid.left) / grid.across - grid.patch_columns / 2, grid.columns - grid.patch_columns)];
  }

  function setUpStage() {
    const stage = $("stage");
    let from = null;
    const point = (event) => {
      const frame = $("stage-photo").getBoundingClientRect();
      return [Math.min(Math.max((event.clientX - frame.left) / frame.width, 0), 1) * photo.width, Math.min(Math.max((event.clientY - frame.top) / frame.height, 0), 1) * photo.height];
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
    stage.addEventListener("pointerleave", () => { if (photo) placeRect(".hover", null); });
    stage.addEventListener("pointerup", () => { from = null; });
    stage.addEventListener("pointercancel", () => { from = null; });
    stage.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const { grid } = photo, at = cell ? cell.patch : [Math.floor(grid.rows / 2), Math.floor(grid.columns / 2)];
      mark(null, [clamp(at[0] + step[0], grid.rows - grid.patch_rows), clamp(at[1] + step[1], grid.columns - grid.patch_columns)]);
    });
  }

  function chooseSide(button) {
    side = button.dataset.side;
    for (const one of document.querySelectorAll(".choose-side")) one.setAttribute("aria-pressed", String(one === button));
    for (const name of document.querySelectorAll(".side-name")) name.textContent = side;
    $("label").value = button.dataset.label;
    start = 0;
    Promise.all([loadCandidates(), loadPhotos()]).catch((error) => say(error.message, true));
  }

  function setUpNode() {
    for (const button of document.querySelectorAll(".choose-side")) button.addEventListener("click", () => chooseSide(button));
    $("note-form").addEventListener("submit", async (event) => { event.preventDefault(); if (await edit({ edit: "note", node, text: $("note").value }, "Noted.")) await renew(); });
    $("label").addEventListener("change", () => { start = 0; loadPhotos().catch((error) => say(error.message, true)); });
    $("earlier").addEventListener("click", () => { start = Math.max(0, start - COUNT); loadPhotos(); });
    $("later").addEventListener("click", () => { start += COUNT; loadPhotos(); });
    $("class-form").addEventListener("submit", (event) => event.preventDefault());
    $("use-patch").addEventListener("click", async () => { if (await edit({ edit: "replace", node, side, photo: photo.index, patch: cell.patch }, "Replaced.")) await renew(); });
    $("exclude-region").addEventListener("click", async () => { if (await edit({ edit: "exclude", photo: photo.index, region: cell.region || cell.box }, "Excluded as a source.")) await renew(); });
    $("exclude-photo").addEventListener("click", async () => { if (await edit({ edit: "exclude", photo: photo.index }, "Excluded as a source.")) await renew(); });
    for (const button of document.querySelectorAll("button.remove")) button.addEventListener("click", () => edit({ edit: "remove", node, keep: button.dataset.keep }, "Removed."));
    setUpStage();
    return Promise.all([loadCandidates(), loadPhotos()]);
  }

  Promise.all([refresh().then(() => ($("learn") ? askLearning() : null)), node === null ? null : setUpNode()]).then(() => { document.documentElement.dataset.ready = "yes"; }).catch((error) => say(error.message, true));
})();

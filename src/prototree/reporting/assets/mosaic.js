// Many cards from afar: one drawing of small pictures instead of thousands of elements, so that large trees move smoothly.
//
// prototreeMosaic(canvas, pictures, mayRead) draws onto a canvas that lies in the world of the tree. `pictures(id)` are
// the addresses of the pictures of a card; each is decoded once, when it `mayRead`, into a sheet of small tiles.
"use strict";
window.prototreeMosaic = (canvas, pictures, mayRead) => {
  const SIDE = 40, PER_ROW = 25, AT_A_TIME = 6, MOST_PIXELS = 16e6;
  const sheets = [], tiles = new Map(), waiting = [];
  let count = 0, busy = 0, drawn = null, timer = 0, later = 0;

  function tileOf(url) { // nothing while the picture is still to be read
    if (!tiles.has(url)) {
      tiles.set(url, null);
      waiting.push(url);
    }
    return tiles.get(url);
  }

  async function read(url) {
    const image = new Image();
    image.src = url;
    try {
      await image.decode();
    } catch {
      return; // its place keeps the colour
    }
    const at = count++ % (PER_ROW * PER_ROW);
    if (at === 0) {
      const sheet = document.createElement("canvas");
      sheet.width = sheet.height = SIDE * PER_ROW;
      sheets.push(sheet);
    }
    const sheet = sheets[sheets.length - 1], x = SIDE * (at % PER_ROW), y = SIDE * Math.floor(at / PER_ROW);
    const side = Math.min(image.naturalWidth, image.naturalHeight), left = (image.naturalWidth - side) / 2, top = (image.naturalHeight - side) / 2;
    sheet.getContext("2d").drawImage(image, left, top, side, side, x, y, SIDE, SIDE);
    tiles.set(url, { sheet, x, y });
  }

  function readOn() {
    if (!mayRead() && waiting.length) {
      clearTimeout(later);
      later = setTimeout(readOn, 250);
      return;
    }
    while (busy < AT_A_TIME && waiting.length) {
      busy += 1;
      read(waiting.shift()).finally(() => {
        busy -= 1;
        readOn();
        if (drawn && !timer) timer = setTimeout(() => { timer = 0; if (drawn) paint(); }, waiting.length || busy ? 300 : 0);
      });
    }
  }

  // `cards` are [id, place, colour, is a leaf], `lines` are [path, colour]; `k` is the zoom it will be seen at.
  function draw(scene) {
    drawn = scene;
    paint();
    readOn();
  }

  function paint() {
    const { extent, cards, lines, k, ground } = drawn, width = extent.right - extent.left, height = extent.bottom - extent.top;
    const scale = Math.min(k * Math.min(2, devicePixelRatio || 1), Math.sqrt(MOST_PIXELS / (width * height)));
    canvas.width = Math.ceil(width * scale);
    canvas.height = Math.ceil(height * scale);
    Object.assign(canvas.style, { left: `${extent.left}px`, top: `${extent.top}px`, width: `${width}px`, height: `${height}px` });
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, -scale * extent.left, -scale * extent.top);
    context.lineWidth = 1.3 / k;
    for (const [path, colour] of lines) {
      context.strokeStyle = colour;
      context.stroke(new Path2D(path));
    }
    for (const [id, spot, colour, isLeaf] of cards) {
      context.fillStyle = isLeaf ? colour : ground;
      context.fillRect(spot.x, spot.y, spot.width, spot.height);
      const shown = pictures(id), rim = isLeaf ? 8 : 4, wide = (spot.width - (shown.length + 1) * rim) / shown.length, high = spot.height - 2 * rim;
      shown.forEach((url, i) => {
        const tile = tileOf(url), side = isLeaf ? 0 : Math.min(wide, high), w = side || wide, h = side || high;
        if (tile) context.drawImage(tile.sheet, tile.x, tile.y, SIDE, SIDE, spot.x + rim + i * (wide + rim) + (wide - w) / 2, spot.y + rim + (high - h) / 2, w, h);
      });
    }
  }

  return { draw, get zoom() { return drawn ? drawn.k : 0; }, forget() { drawn = null; } };
};

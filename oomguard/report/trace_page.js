"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const HATCHED = "in-flight window";
const AXIS = { left: 64, right: 12, top: 22, bottom: 54 };
const PHASES = ["forward", "recompute", "backward", "update"]; // each in the colour of its category
const SHOWN_HOLDERS = 9;

const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const theme = getComputedStyle(document.documentElement);
const colours = new Map();
const seriesColour = (series) => colourOf(DATA.series[series].replaceAll(" ", "-"));

/** A colour of the style sheet; asked for once, because a drawing needs hundreds. */
function colourOf(name) {
  if (!colours.has(name)) colours.set(name, theme.getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

function bytes(size) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(size) >= (unit * 1023.95) / 1024) return `${(size / unit).toFixed(1)} ${name}`;
  }
  return `${size} B`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A square in the colour of a category. */
function swatch(series) {
  const hatched = DATA.series[series] === HATCHED ? " hatched" : "";
  return element("span", { class: `swatch${hatched}`, style: { backgroundColor: seriesColour(series) } });
}

/** One simulated step: bytes by category and what is alive at every primitive. */
class Run {
  constructor(data) {
    Object.assign(this, data);
    this.length = data.primitives;
    this.values = data.series.map((changes) => {
      const column = new Float64Array(this.length);
      for (let k = 0; k < changes.length; k += 2) column.fill(changes[k + 1], changes[k], changes[k + 2] ?? this.length);
      return column;
    });
    this.active = new Float64Array(this.length);
    for (const column of this.values) column.forEach((value, i) => (this.active[i] += value));
    this.peakAt = clamp(data.at, 0, this.length - 1);
    this.near = this.nearBlocks();
  }

  /** The block at every position; a short stretch that is in no block goes with the block before it. */
  nearBlocks() {
    const blocks = Int32Array.from({ length: this.length }, (_, i) => this.moments[4 * i + 3]);
    const short = Math.max(8, this.length / 100);
    let last = -1;
    for (let i = 0; i < this.length; i++) {
      if (blocks[i] >= 0) {
        if (last >= 0 && i - last <= short) blocks.fill(blocks[last], last + 1, i);
        last = i;
      }
    }
    return blocks;
  }

  /** Primitive, phase, module and block at a position. */
  moment(i) {
    const [primitive, phase, scope, block] = this.moments.slice(4 * i, 4 * i + 4);
    return { primitive: this.strings[primitive], phase: this.strings[phase], scope: this.strings[scope], block };
  }

  /** The position with the most active bytes from one to another (exclusive): what a pixel shows. */
  highest(from, to) {
    let best = from;
    for (let i = from + 1; i < to; i++) if (this.active[i] > this.active[best]) best = i;
    return best;
  }

  /** What is alive at a position, grouped over the blocks, the largest sum first. */
  holders(i) {
    const groups = new Map();
    for (let k = 0; k < this.spans.length; k += 4) {
      if (this.spans[k + 2] > i || this.spans[k + 3] <= i) continue;
      const [name, pattern, what, form, series] = this.owners[this.spans[k]];
      const size = this.spans[k + 1];
      const key = `${pattern}|${what}|${size}`;
      const group = groups.get(key) ?? { name, pattern, what, form, series, size, count: 0 };
      if (group.name !== name) group.name = pattern;
      group.count += 1;
      groups.set(key, group);
    }
    return [...groups.values()].sort((a, b) => b.count * b.size - a.count * a.size);
  }

  /** What the primitive at a position wrote: the buffers whose stay begins there. */
  written(i) {
    const found = [];
    for (let k = 0; k < this.spans.length; k += 4) {
      if (this.spans[k + 2] !== i || this.spans[k + 3] <= i) continue;
      const [name, , , form, series, primitive] = this.owners[this.spans[k]];
      if (DATA.series[series] !== HATCHED && primitive) found.push({ name, form, size: this.spans[k + 1] });
    }
    return found.sort((a, b) => b.size - a.size);
  }

  place(i) {
    const { primitive, phase, scope, block } = this.moment(i);
    const where = scope ? ` in ${scope}` : "";
    return `${primitive}, ${phase}${block >= 0 ? ` of block ${block}` : ""}${where}`;
  }
}

const runs = DATA.runs.map((data) => new Run(data));
const highestPeak = Math.max(...runs.map((run) => run.peak));
const budgetShown = DATA.budget !== null && DATA.budget <= 2.2 * highestPeak;
const ceiling = 1.04 * Math.max(highestPeak, budgetShown ? DATA.budget : 0);

/** Heights for grid lines: three to six of them, at round binary sizes. */
function gridSizes() {
  const step = 2 ** Math.ceil(Math.log2(ceiling / 6));
  return Array.from({ length: Math.floor(ceiling / step) + 1 }, (_, k) => k * step);
}

/** The stacked area of one run, with its cursor, zoom and labels. */
class Chart {
  constructor(run, onChoose) {
    this.run = run;
    this.onChoose = onChoose;
    this.from = 0;
    this.to = run.length;
    this.at = run.peakAt;
    this.lit = null;
    this.area = element("canvas", { "aria-hidden": "true" });
    this.marks = element("canvas", { "aria-hidden": "true" });
    this.peakTag = element("div", { class: "tag peak", text: `peak ${bytes(run.peak)}` });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.plot = element(
      "div",
      { class: "plot", tabindex: "0", role: "slider", "aria-label": `Active memory, ${run.about}`, "aria-valuemin": "1", "aria-valuemax": String(run.length) },
      this.area, this.marks, this.peakTag, this.tip,
    );
    if (DATA.budget !== null) {
      const text = `budget ${bytes(DATA.budget)}${budgetShown ? "" : " ↑"}`;
      this.budgetTag = element("div", { class: "tag budget", text });
      this.plot.append(this.budgetTag);
    }
    this.node = element("article", { class: "chart" }, this.head(), this.plot);
    this.listen();
  }

  head() {
    const { run } = this;
    const over = run.tooLarge ? " over" : DATA.budget === null ? "" : run.peak > DATA.budget ? " over" : " under";
    const head = element("div", { class: "head" });
    head.append(element("h2", { text: run.about }), element("span", { class: `figure${over}`, text: bytes(run.peak) }));
    if (DATA.budget !== null) {
      const gap = DATA.budget - run.peak;
      head.append(element("span", { class: over.trim(), text: `${bytes(Math.abs(gap))} ${gap < 0 ? "over" : "below"} the budget` }));
    }
    if (run.tooLarge) {
      head.append(element("span", { class: "over", text: `one buffer of ${bytes(run.largest)}, ${bytes(run.allowed)} at most` }));
    }
    const tools = [["−", "Zoom out", () => this.zoom(2)], ["+", "Zoom in", () => this.zoom(0.5)], ["All", "Show the whole step", () => this.whole()], ["Peak", "Go to the peak", () => this.choose(run.peakAt)]];
    const group = element("div", { class: "tools" });
    for (const [text, label, act] of tools) {
      const button = element("button", { type: "button", "aria-label": `${label}, ${run.about}`, text });
      button.addEventListener("click", act);
      group.append(button);
    }
    const share = Math.round((100 * run.inFlight) / run.peak);
    const facts = [
      `sequenced ${bytes(run.sequenced)}`,
      `in flight ${bytes(run.inFlight)} (${share}%)`,
      `${count(run.length)} primitives`,
      ...(run.heldAt === null ? [] : [`held down by the memory limit of ${bytes(run.heldAt)}`]),
    ];
    head.append(element("p", { class: "facts", text: facts.join(" · ") }), group);
    return head;
  }

  listen() {
    const { plot } = this;
    plot.addEventListener("keydown", (event) => this.key(event));
    plot.addEventListener("focus", () => this.choose(this.at));
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.dragFrom = this.x(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => this.pointed(event));
    plot.addEventListener("pointerup", (event) => this.dropped(event));
    plot.addEventListener("pointercancel", () => this.drag(null));
    plot.addEventListener("pointerleave", () => this.hideTip());
    plot.addEventListener("blur", () => this.hideTip());
    plot.addEventListener("dblclick", () => this.whole());
    new ResizeObserver(() => this.draw()).observe(plot);
  }

  x(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  get width() {
    return Math.max(1, this.plot.clientWidth - AXIS.left - AXIS.right);
  }

  get height() {
    return Math.max(1, this.plot.clientHeight - AXIS.top - AXIS.bottom);
  }

  /** The range of positions that a pixel column shows. */
  bucket(column, columns) {
    const span = this.to - this.from;
    const first = clamp(this.from + Math.floor((column * span) / columns), this.from, this.to - 1);
    const last = this.from + Math.floor(((column + 1) * span) / columns);
    return [first, clamp(last, first + 1, this.to)];
  }

  /** The position under an x, the highest of those that share the pixel. */
  position(x) {
    const columns = Math.round(this.width);
    const column = clamp(Math.floor(((x - AXIS.left) * columns) / this.width), 0, columns - 1);
    return this.run.highest(...this.bucket(column, columns));
  }

  xOf(position) {
    return AXIS.left + ((position + 0.5 - this.from) / (this.to - this.from)) * this.width;
  }

  yOf(size) {
    return AXIS.top + this.height * (1 - size / ceiling);
  }

  pointed(event) {
    const x = this.x(event);
    if (this.dragFrom !== undefined && Math.abs(x - this.dragFrom) > 4) this.drag([this.dragFrom, x]);
    const at = this.position(x);
    if (at !== this.at || this.tip.hidden) this.choose(at, true);
  }

  dropped(event) {
    const x = this.x(event);
    if (this.selection && Math.abs(x - this.dragFrom) > 4) {
      const [a, b] = [this.dragFrom, x].sort((one, two) => one - two).map((at) => (at - AXIS.left) / this.width);
      const span = this.to - this.from;
      this.show(this.from + Math.floor(clamp(a, 0, 1) * span), this.from + Math.ceil(clamp(b, 0, 1) * span));
    }
    this.drag(null);
  }

  drag(selection) {
    this.selection = selection;
    if (selection === null) this.dragFrom = undefined;
    this.drawMarks();
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const stride = event.shiftKey ? 10 : 1;
    const acts = {
      ArrowLeft: () => this.choose(this.at - stride, true), ArrowDown: () => this.choose(this.at - stride, true),
      ArrowRight: () => this.choose(this.at + stride, true), ArrowUp: () => this.choose(this.at + stride, true),
      PageUp: () => this.choose(this.nextBlock(1), true), PageDown: () => this.choose(this.nextBlock(-1), true),
      Home: () => this.choose(0, true), End: () => this.choose(this.run.length - 1, true),
      p: () => this.choose(this.run.peakAt, true), P: () => this.choose(this.run.peakAt, true),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Escape: () => this.whole(),
    };
    const act = acts[event.key];
    if (act === undefined) return;
    event.preventDefault();
    act();
  }

  /** The first position, in a direction, that lies in another block. */
  nextBlock(direction) {
    const block = this.run.moment(this.at).block;
    let i = this.at;
    while (i + direction >= 0 && i + direction < this.run.length) {
      i += direction;
      const next = this.run.moment(i).block;
      if (next !== block && next >= 0) return i;
    }
    return i;
  }

  choose(at, tip = false) {
    this.at = clamp(at, 0, this.run.length - 1);
    if (this.at < this.from || this.at >= this.to) {
      const half = (this.to - this.from) / 2;
      this.from = clamp(Math.round(this.at - half), 0, this.run.length - Math.round(2 * half));
      this.to = this.from + Math.round(2 * half);
      this.draw();
    }
    const text = `primitive ${count(this.at + 1)} of ${count(this.run.length)}: ${this.run.place(this.at)}, ${bytes(this.run.active[this.at])}`;
    this.plot.setAttribute("aria-valuenow", String(this.at + 1));
    this.plot.setAttribute("aria-valuetext", text);
    this.onChoose(this);
    this.drawMarks();
    if (tip) this.showTip();
    else this.hideTip();
  }

  show(from, to) {
    const least = Math.min(8, this.run.length);
    const middle = (from + to) / 2;
    const half = Math.max(to - from, least) / 2;
    this.from = clamp(Math.round(middle - half), 0, this.run.length - least);
    this.to = clamp(Math.round(middle + half), this.from + least, this.run.length);
    this.draw();
  }

  zoom(factor) {
    const half = ((this.to - this.from) * factor) / 2;
    const centre = clamp(this.at, this.from, this.to);
    this.show(Math.max(0, centre - half), Math.min(this.run.length, centre + half));
  }

  whole() {
    this.show(0, this.run.length);
  }

  showTip() {
    const { run, at } = this;
    const moment = run.moment(at);
    const list = element("ul");
    for (const holder of run.holders(at).slice(0, 4)) {
      const many = holder.count > 1 ? `${holder.count} × ` : "";
      list.append(element("li", {}, swatch(holder.series), element("span", { class: "size", text: bytes(holder.count * holder.size) }), element("span", { class: "name", text: `${many}${holder.name} ${holder.what}` })));
    }
    const where = [moment.phase, moment.block >= 0 ? `block ${moment.block}` : "", moment.scope].filter(Boolean).join(" · ");
    const written = run.written(at)[0];
    this.tip.replaceChildren(
      element("p", {}, element("b", { text: `${bytes(run.active[at])}  ` }), element("span", { text: `${moment.primitive}, ${count(at + 1)} of ${count(run.length)}` })),
      element("p", { class: "faint", text: where }),
      element("p", { class: "faint", text: written ? `writes ${written.name} ${written.form}, ${bytes(written.size)}` : "writes no buffer" }),
      list,
    );
    this.tip.hidden = false;
    const x = this.xOf(at);
    const right = x + 16 + this.tip.offsetWidth < this.plot.clientWidth;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${right ? x + 16 : clamp(x - 16 - this.tip.offsetWidth, 0, room)}px`;
    this.tip.style.top = `${AXIS.top + 8}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  /** A clean canvas of the plot's size, to be drawn on in CSS pixels. */
  pen(canvas) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(this.plot.clientWidth * ratio);
    canvas.height = Math.round(this.plot.clientHeight * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return pen;
  }

  /** Everything; while the cursor moves only ``drawMarks``, on a canvas of its own. */
  draw() {
    const pen = this.pen(this.area);
    this.drawGrid(pen);
    this.drawStack(pen, window.devicePixelRatio || 1);
    this.drawStrips(pen);
    this.drawCaptions(pen);
    this.drawMarks();
  }

  drawGrid(pen) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const size of gridSizes()) {
      const y = Math.round(this.yOf(size)) + 0.5;
      pen.strokeStyle = colourOf("grid");
      pen.beginPath();
      pen.moveTo(AXIS.left, y);
      pen.lineTo(AXIS.left + this.width, y);
      pen.stroke();
      pen.fillStyle = colourOf("faint");
      pen.fillText(size ? bytes(size) : "0", AXIS.left - 7, y);
    }
  }

  /** For each pixel column the stack of the highest moment in it, so that no peak is lost. */
  drawStack(pen, ratio) {
    const columns = Math.max(1, Math.round(this.width * ratio));
    const picked = Array.from({ length: columns }, (_, column) => this.run.highest(...this.bucket(column, columns)));
    const below = new Float64Array(columns);
    const step = this.width / columns;
    this.run.values.forEach((values, series) => {
      pen.beginPath();
      for (let c = columns - 1; c >= 0; c--) {
        const y = this.yOf(below[c]);
        pen.lineTo(AXIS.left + (c + 1) * step, y);
        pen.lineTo(AXIS.left + c * step, y);
        below[c] += values[picked[c]];
      }
      for (let c = 0; c < columns; c++) {
        const y = this.yOf(below[c]);
        pen.lineTo(AXIS.left + c * step, y);
        pen.lineTo(AXIS.left + (c + 1) * step, y);
      }
      pen.globalAlpha = this.lit === null || this.lit === series ? 1 : 0.22;
      pen.fillStyle = seriesColour(series);
      pen.fill();
      if (DATA.series[series] === HATCHED) {
        pen.fillStyle = this.hatching(pen);
        pen.fill();
      }
    });
    pen.globalAlpha = 1;
  }

  hatching(pen) {
    const tile = element("canvas", { width: "6", height: "6" });
    const line = tile.getContext("2d");
    line.strokeStyle = colourOf("card");
    line.globalAlpha = 0.55;
    line.lineWidth = 1.6;
    line.beginPath();
    for (const shift of [-6, 0, 6]) {
      line.moveTo(shift, 6);
      line.lineTo(shift + 6, 0);
    }
    line.stroke();
    return pen.createPattern(tile, "repeat");
  }

  /** Below the plot: which phase and which block each primitive is in. */
  drawStrips(pen) {
    const y = AXIS.top + this.height + 5;
    this.strip(pen, y, (i) => this.run.moment(i).phase, (phase) => colourOf(PHASES.includes(phase) ? phase : "the-rest"));
    this.strip(pen, y + 15, (i) => (this.run.near[i] >= 0 ? `block ${this.run.near[i]}` : ""), (name) => (name ? colourOf(Number(name.slice(6)) % 2 ? "line" : "grid") : null));
  }

  /** What the axes and the strips are. */
  drawCaptions(pen) {
    const bottom = AXIS.top + this.height;
    pen.fillStyle = colourOf("faint");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    pen.fillText("active", AXIS.left - 7, 6);
    pen.fillText("phase", AXIS.left - 7, bottom + 12);
    pen.fillText("block", AXIS.left - 7, bottom + 27);
    pen.fillText("primitive", AXIS.left - 7, bottom + 44);
    const [first, last] = [count(this.from + 1), count(this.to)];
    pen.fillText(last, AXIS.left + this.width, bottom + 44);
    pen.textAlign = "left";
    pen.fillText(first, AXIS.left, bottom + 44);
    pen.textAlign = "center";
    pen.fillText("in the order they run →", AXIS.left + this.width / 2, bottom + 44);
  }

  strip(pen, y, nameOf, colourFor) {
    const columns = Math.round(this.width);
    let start = 0;
    let name = nameOf(this.bucket(0, columns)[0]);
    for (let c = 1; c <= columns; c++) {
      const next = c < columns ? nameOf(this.bucket(c, columns)[0]) : null;
      if (next === name) continue;
      const colour = colourFor(name);
      if (colour !== null) {
        pen.fillStyle = colour;
        pen.fillRect(AXIS.left + start, y, c - start, 13);
      }
      const texts = [name, name.replace("block ", "")].filter((text) => text && pen.measureText(text).width + 8 < c - start);
      if (texts.length) {
        pen.fillStyle = name.startsWith("block") ? colourOf("faint") : this.inkOn(colour);
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(texts[0], AXIS.left + (start + c) / 2, y + 7);
      }
      [start, name] = [c, next];
    }
  }

  /** Black or white, whichever is read more easily on a colour. */
  inkOn(colour) {
    const [red, green, blue] = [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111418" : "#ffffff";
  }

  drawMarks() {
    const pen = this.pen(this.marks);
    const bottom = AXIS.top + this.height;
    if (this.selection) {
      const [a, b] = this.selection.map((x) => clamp(x, AXIS.left, AXIS.left + this.width));
      pen.fillStyle = colourOf("shade");
      pen.fillRect(Math.min(a, b), AXIS.top, Math.abs(b - a), this.height);
    }
    if (budgetShown) this.line(pen, AXIS.left, this.yOf(DATA.budget), AXIS.left + this.width, this.yOf(DATA.budget), colourOf("bad"), [6, 4], 1.5);
    if (this.at >= this.from && this.at < this.to) {
      this.line(pen, this.xOf(this.at), AXIS.top, this.xOf(this.at), bottom + 33, colourOf("accent"), [], 1.2);
    }
    this.placeTags(pen);
  }

  line(pen, x1, y1, x2, y2, colour, dash, width) {
    pen.save();
    pen.strokeStyle = colour;
    pen.setLineDash(dash);
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    pen.restore();
  }

  placeTags(pen) {
    const { run, peakTag, budgetTag } = this;
    const inside = run.peakAt >= this.from && run.peakAt < this.to;
    peakTag.hidden = !inside;
    const [x, y] = [this.xOf(run.peakAt), this.yOf(run.peak)];
    if (inside) {
      pen.fillStyle = colourOf("ink");
      pen.strokeStyle = colourOf("card");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(x, y, 4.5, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
      const left = clamp(x - peakTag.offsetWidth / 2, AXIS.left, AXIS.left + this.width - peakTag.offsetWidth);
      peakTag.style.left = `${left}px`;
      peakTag.style.top = `${Math.max(0, y - 28)}px`;
    }
    if (budgetTag === undefined) return;
    const top = budgetShown ? this.yOf(DATA.budget) - 11 : 0;
    const right = AXIS.left + this.width - budgetTag.offsetWidth - 4;
    const free = [right, AXIS.left + 4].find((left) => !inside || !this.covers(left, top, x, y));
    budgetTag.style.left = `${free ?? right}px`;
    budgetTag.style.top = `${Math.max(0, top)}px`;
  }

  /** Whether the budget's label, put there, would lie on the peak or its label. */
  covers(left, top, x, y) {
    const { peakTag, budgetTag } = this;
    const [width, height] = [budgetTag.offsetWidth, budgetTag.offsetHeight];
    const tagLeft = parseFloat(peakTag.style.left);
    const tagTop = parseFloat(peakTag.style.top);
    const onTag = left < tagLeft + peakTag.offsetWidth && tagLeft < left + width && top < tagTop + peakTag.offsetHeight && tagTop < top + height;
    return onTag || (left < x + 8 && x - 8 < left + width && top < y + 8 && y - 8 < top + height);
  }
}

/** The three cards below the charts: what the chosen primitive is, and what is alive then. */
class Panel {
  constructor(charts) {
    this.charts = charts;
    this.lit = null;
    this.rows = DATA.series.map((name, series) => this.row(name, series));
    byId("legend").append(...[...this.rows].reverse().map((row) => element("li", {}, row.button)));
    byId("moment").hidden = false;
  }

  row(name, series) {
    const bar = element("i", { style: { backgroundColor: seriesColour(series) } });
    const size = element("span", { class: "number" });
    const share = element("span", { class: "number faint" });
    const button = element("button", { type: "button", "aria-pressed": "false", title: "Highlight in the charts" }, swatch(series), element("span", { text: name }), element("span", { class: "track" }, bar), size, share);
    button.addEventListener("click", () => this.light(this.lit === series ? null : series));
    button.addEventListener("pointerenter", () => this.paint(series));
    button.addEventListener("pointerleave", () => this.paint(this.lit));
    return { button, bar, size, share };
  }

  light(series) {
    this.lit = series;
    this.rows.forEach((row, k) => row.button.setAttribute("aria-pressed", String(k === series)));
    this.paint(series);
  }

  paint(series) {
    for (const chart of this.charts) {
      chart.lit = series;
      chart.draw();
    }
  }

  show(chart) {
    const { run, at } = chart;
    const { primitive, phase, scope, block } = run.moment(at);
    const which = runs.length > 1 ? `, ${run.about}` : "";
    byId("moment-title").textContent = `${at === run.peakAt ? "Peak, primitive" : "Primitive"} ${count(at + 1)} of ${count(run.length)}${which}`;
    const [first, ...others] = run.written(at);
    const more = others.length ? `, and ${others.length} more` : "";
    const facts = {
      Active: bytes(run.active[at]),
      Primitive: primitive,
      Phase: phase || "none",
      Block: block >= 0 ? String(block) : "none",
      Module: scope || "none",
      Writes: first ? `${first.name} ${first.form}, ${bytes(first.size)}${more}` : "no buffer",
    };
    byId("moment-facts").replaceChildren(
      ...Object.entries(facts).flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })]),
    );
    this.rows.forEach((row, series) => {
      const share = run.values[series][at] / (run.active[at] || 1);
      row.bar.style.width = `${100 * share}%`;
      row.size.textContent = bytes(run.values[series][at]);
      row.share.textContent = `${Math.round(100 * share)}%`;
    });
    this.showHolders(run.holders(at));
    for (const other of this.charts) other.node.classList.toggle("chosen", other === chart && runs.length > 1);
  }

  showHolders(groups) {
    const rows = groups.slice(0, SHOWN_HOLDERS).map((group) => {
      const each = group.count > 1 ? `${count(group.count)} × ${bytes(group.size)}` : "";
      return this.holder(swatch(group.series), group.count * group.size, each, `${group.name} ${group.what} `, group.form);
    });
    const rest = groups.slice(SHOWN_HOLDERS);
    if (rest.length) {
      const buffers = rest.reduce((sum, group) => sum + group.count, 0);
      rows.push(this.holder("", rest.reduce((sum, group) => sum + group.count * group.size, 0), "", "", `${count(buffers)} other buffers`));
    }
    byId("holders").tBodies[0].replaceChildren(...rows);
  }

  holder(mark, size, each, text, detail) {
    return element("tr", {}, element("td", { class: "size", text: bytes(size) }), element("td", { class: "size faint", text: each }), element("td", {}, mark, text, element("span", { class: "faint", text: detail })));
  }
}

/** What the two strips under a chart mean. */
function showKey() {
  const seen = new Set(runs.flatMap((run) => Array.from({ length: run.length }, (_, i) => run.moment(i).phase)));
  const phases = PHASES.filter((phase) => seen.has(phase));
  const others = seen.size > phases.length ? [["other", "the-rest"]] : [];
  const square = (colour) => element("i", { class: "swatch", style: { backgroundColor: colourOf(colour) } });
  byId("key").append(
    element("span", { text: "Under a chart, phase:" }),
    ...[...phases.map((phase) => [phase, phase]), ...others].map(([text, colour]) => element("span", {}, square(colour), text)),
    element("span", { text: "and block: the layer a primitive belongs to, light and dark in turn" }),
  );
}

function main() {
  byId("title").textContent = DATA.title;
  const first = runs[0];
  const limit = DATA.limit === null ? "" : `, memory limit ${bytes(DATA.limit)}`;
  const simulated = `simulated on ${DATA.machine}${DATA.mlx ? ` with MLX ${DATA.mlx}` : ""}, ${first.mode}${limit}`;
  byId("settings").textContent = [DATA.settings, simulated].filter(Boolean).join(" — ");
  byId("verdict").textContent = DATA.verdict;
  byId("verdict").className = DATA.fits === null ? "" : DATA.fits ? "under" : "over";
  byId("advice").append(...DATA.advice.map((text) => element("li", { text })));
  byId("advice").hidden = DATA.advice.length === 0;
  showKey();
  let panel = null;
  const charts = runs.map((run) => new Chart(run, (chart) => panel.show(chart)));
  panel = new Panel(charts);
  byId("charts").append(...charts.map((chart) => chart.node));
  const warnings = [...new Set(runs.flatMap((run) => run.warnings))];
  byId("warnings").append(...warnings.map((text) => element("li", { text })));
  byId("warnings").hidden = warnings.length === 0;
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
  for (const chart of [...charts].reverse()) chart.choose(chart.run.peakAt);
  document.documentElement.dataset.drawn = "yes";
}

main();

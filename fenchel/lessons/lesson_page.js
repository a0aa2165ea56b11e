// A lesson of the web edition: stored outputs for every position of the controls, charts, an exercise.
//
// The data block has { name, controls: { name: { labels, start } }, cells: { id: { controls, states } }, pieces }:
// `pieces` are distinct outputs as HTML, one JSON list, gzip, base64; `states` says which of them a cell shows,
// the last control running fastest. The page itself has the outputs of the first positions.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg"; // a namespace, never fetched
const SHAPES = ["svg", "g", "path", "rect", "circle", "text", "line", "title", "clipPath"];

function node(name, attributes = {}, ...children) {
	const made = SHAPES.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
	for (const key in attributes) if (attributes[key] !== undefined) made.setAttribute(key, attributes[key]);
	made.append(...children);
	return made;
}
const range = (count) => Array.from({ length: count }, (_, i) => i);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// ---- controls and stored states; the address has what differs from the first positions

const inAddress = ([name]) => !document.querySelector(`[data-scene="${CSS.escape(name)}"]`); // a scene begins at its first state
const at = Object.fromEntries(Object.entries(data.controls).map(([name, control]) => [name, control.start]));
let pieces = null;

async function unpacked(text) {
	const code = atob(text), bytes = Uint8Array.from(code, (sign) => sign.charCodeAt(0));
	const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
	return JSON.parse(await new Response(stream).text());
}
function show(names) {
	if (!pieces) return;
	for (const [id, cell] of Object.entries(data.cells)) {
		if (!cell.controls.some((name) => names.includes(name))) continue;
		const index = cell.controls.reduce((sum, name) => sum * data.controls[name].labels.length + at[name], 0);
		const host = document.getElementById(id), html = pieces[cell.states[index]];
		if (host.dataset.piece === String(cell.states[index])) continue;
		host.dataset.piece = cell.states[index];
		const open = [...host.querySelectorAll("details")].map((fold) => fold.open);
		host.innerHTML = html;
		host.querySelectorAll("details").forEach((fold, i) => {
			fold.open = open[i] ?? false;
		});
		host.querySelectorAll("[data-chart]").forEach(draw);
		host.querySelectorAll("[data-control]").forEach(place);
	}
}
function place(input) { // the input of a control at its position
	const name = input.dataset.control, { labels } = data.controls[name];
	if (input.type === "radio") input.checked = +input.value === at[name];
	else input.value = at[name];
	if (input.type === "range") {
		input.parentElement.querySelector("output").textContent = labels[at[name]];
		input.setAttribute("aria-valuetext", labels[at[name]]);
	}
}
function move(positions) {
	Object.assign(at, positions);
	const names = Object.keys(positions);
	for (const name of names) document.querySelectorAll(`[data-control="${CSS.escape(name)}"]`).forEach(place);
	show(names);
}
function read() {
	const given = new URLSearchParams(location.hash.slice(1)), positions = {};
	for (const [name, control] of Object.entries(data.controls).filter(inAddress)) {
		const kept = control.labels[0] === "" ? progress.of(data.name).prediction : undefined; // a prediction: nothing is chosen at first
		const found = control.labels.indexOf(given.get(name) ?? kept);
		positions[name] = found < 0 ? control.start : found;
	}
	return positions;
}
function write() {
	const kept = new URLSearchParams();
	for (const [name, control] of Object.entries(data.controls).filter(inAddress)) if (at[name] !== control.start) kept.set(name, control.labels[at[name]]);
	try {
		history.replaceState(null, "", String(kept) ? `#${kept}` : location.pathname + location.search);
	} catch { /* a browser limits how often: the next change writes it */ }
}
document.addEventListener("input", (event) => {
	const { control } = event.target.dataset;
	if (control === undefined) return;
	move({ [control]: +event.target.value });
	if (event.target.type === "radio") progress.patch(data.name, { prediction: data.controls[control].labels[at[control]] });
	write();
});
addEventListener("message", ({ source, data: sent }) => { // a scene was moved (share in scene.js); its labels are states
	const frame = [...document.querySelectorAll("[data-scene]")].find((each) => each.contentWindow === source);
	if (!frame || !sent?.state) return;
	const name = frame.dataset.scene, same = (label) => Object.entries(JSON.parse(label)).every(([part, value]) => sent.state[part] === value);
	const found = data.controls[name].labels.findIndex(same);
	if (found >= 0) move({ [name]: found });
});
addEventListener("hashchange", () => move(read()));

// ---- charts, drawn for their width so that type keeps its size

const DASHES = [undefined, "6 4", "2 3", "9 3 2 3", "12 4", "4 2", "1 3"];
const short = (value) => {
	const size = Math.abs(value);
	if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(0).replace("e+", "e").replace("-", "\u2212");
	return String(+value.toPrecision(4)).replace("-", "\u2212");
};
function ticks(low, high, count) {
	const rough = (high - low) / count || 1, base = 10 ** Math.floor(Math.log10(rough)), step = base * [1, 2, 5, 10].find((n) => n * base >= rough * 0.999);
	const first = Math.ceil(low / step - 1e-9);
	return range(Math.max(0, Math.floor(high / step + 1e-9) - first + 1)).map((i) => (first + i) * step);
}
function scaleOf(axis, values, from, to, count, zero) {
	const good = values.filter((value) => value !== null && (!axis.log || value > 0));
	let [low, high] = axis.domain ?? [Math.min(...good), Math.max(...good)];
	if (!axis.domain && zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
	if (!(low < high)) [low, high] = axis.log ? [low / 2, low * 2] : [low - 0.5, low + 0.5];
	if (axis.log) {
		const a = Math.log10(low), b = Math.log10(high), every = Math.max(1, Math.ceil((b - a) / count));
		const marks = range(Math.floor(b + 1e-9) - Math.ceil(a - 1e-9) + 1).map((i) => Math.ceil(a - 1e-9) + i).filter((power) => power % every === 0).map((power) => 10 ** power);
		return { of: (value) => from + (Math.log10(value) - a) / (b - a) * (to - from), marks: marks.length > 1 ? marks : [low, high], log: true };
	}
	if (!axis.domain) {
		const step = ticks(low, high, count), gap = step.length > 1 ? step[1] - step[0] : 1;
		low = Math.floor(low / gap + 1e-9) * gap;
		high = Math.ceil(high / gap - 1e-9) * gap;
	}
	return { of: (value) => from + (value - low) / (high - low) * (to - from), marks: ticks(low, high, count) };
}
function draw(host) {
	const chart = JSON.parse(host.dataset.chart), W = clamp(host.clientWidth || 600, 280, 736);
	host.replaceChildren(...{ line: lineChart, bar: barChart, heat: heatChart }[chart.kind](chart, W));
}
function legend(lines) {
	if (lines.length < 2) return [];
	const keys = lines.map(({ name }, i) => node("span", { class: "key" }, node("svg", { class: `c${i % 7}`, width: 26, height: 10 }, node("path", { d: "M0 5H26", "stroke-width": 3, "stroke-dasharray": DASHES[i % 7] })), name));
	return [node("div", {}, ...keys)];
}
let clips = 0;
function frame(svg, x, y, L, R, T, B, titles) {
	for (const mark of y.marks) svg.append(node("line", { class: "grid", x1: L, x2: R, y1: y.of(mark), y2: y.of(mark) }), node("text", { class: "end", x: L - 6, y: y.of(mark) }, short(mark)));
	if (x) for (const mark of x.marks) svg.append(node("line", { class: "grid", x1: x.of(mark), x2: x.of(mark), y1: T, y2: B }), node("text", { class: "middle", x: x.of(mark), y: B + 14 }, short(mark)));
	if (titles.y) svg.append(node("text", { x: 2, y: 8 }, titles.y));
	if (titles.x) svg.append(node("text", { class: "end", x: R, y: B + 34 }, titles.x));
}
function lineChart(chart, width) {
	const W = chart.square ? Math.min(width, 360) : width, L = 52, R = W - 12, T = 22, H = chart.square ? W : 300, B = H - 46, id = `clip${clips++}`;
	const all = chart.lines.flatMap((line) => line.points), other = [...(chart.cloud ?? []), ...(chart.here ?? [])];
	const x = scaleOf(chart.x, [...all, ...other, ...(chart.walls ?? [])].map((p) => p[0]), L, R, W < 500 ? 4 : 7);
	const y = scaleOf(chart.y, [...all, ...other].map((p) => p[1]), B, T, 5);
	const svg = node("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "chart; its numbers are in the table below" });
	const seen = ([a, b]) => a !== null && b !== null && !(x.log && a <= 0) && !(y.log && b <= 0), place = ([a, b]) => `${x.of(a).toFixed(1)} ${y.of(b).toFixed(1)}`;
	svg.append(node("clipPath", { id }, node("rect", { x: L - 4, y: T - 4, width: R - L + 8, height: B - T + 8 })));
	frame(svg, x, y, L, R, T, B, { x: chart.x.title, y: chart.y.title });
	const inside = node("g", { "clip-path": `url(#${id})` });
	if (chart.cloud) {
		const few = chart.cloud.length <= 50, r = few ? 4 : 1.5;
		const dots = chart.cloud.filter(seen).map(([a, b]) => `M${(x.of(a) - r).toFixed(1)} ${y.of(b).toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`);
		inside.append(node("path", { class: few ? "cloud few" : "cloud", d: dots.join("") }));
	}
	chart.lines.forEach(({ name, points }, i) => {
		const shown = points.filter(seen);
		if (shown.length) inside.append(node("path", { class: `curve c${i % 7}`, d: `M${shown.map(place).join("L")}`, "stroke-dasharray": DASHES[i % 7] }, node("title", {}, name)));
		if (chart.points || shown.length === 1) for (const p of shown) inside.append(node("circle", { class: `dot c${i % 7}`, cx: x.of(p[0]), cy: y.of(p[1]), r: 3 }));
	});
	for (const [a] of chart.walls ?? []) inside.append(node("line", { class: "wall", x1: x.of(a), x2: x.of(a), y1: T, y2: B }));
	for (const p of (chart.here ?? []).filter(seen)) inside.append(node("circle", { class: "here", cx: x.of(p[0]), cy: y.of(p[1]), r: 6 }));
	svg.append(inside);
	return [svg, ...legend(chart.lines)];
}
function wrapped(name, x, y, most) { // a label on at most three lines
	const made = node("text", { class: "middle" }), lines = [""];
	for (const word of name.split(" ")) {
		const longer = `${lines.at(-1)} ${word}`.trim();
		if (longer.length <= most || !lines.at(-1)) lines[lines.length - 1] = longer;
		else lines.push(word);
	}
	return lines.slice(0, 3).map((line, i) => node("text", { class: "middle", x, y: y + 14 * i }, line.length > most + 2 ? `${line.slice(0, most + 1)}…` : line));
}
function barChart(chart, W) {
	const L = 52, R = W - 12, T = 22, H = 310, B = H - 74, n = chart.names.length, k = chart.lines.length;
	const y = scaleOf(chart.y, chart.lines.flatMap((line) => line.values), B, T, 5, true), room = (R - L) / n, wide = Math.min(64, room * 0.76) / k;
	const svg = node("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "chart; its numbers are in the table below" });
	frame(svg, null, y, L, R, T, B, { x: chart.x, y: chart.y.title });
	const zero = clamp(y.of(0), T, B), most = Math.max(3, Math.floor(room / 6.8)), every = Math.ceil(n * 20 / (R - L));
	chart.names.forEach((name, i) => {
		const middle = L + room * (i + 0.5);
		chart.lines.forEach(({ values }, s) => {
			if (values[i] === null || values[i] === undefined) return;
			const top = clamp(y.of(values[i]), T, B);
			svg.append(node("rect", { class: `bar c${s % 7}${chart.here === i ? " here" : ""}`, x: middle - wide * k / 2 + wide * s, y: Math.min(top, zero), width: Math.max(1, wide - 1), height: Math.abs(zero - top) }, node("title", {}, `${name}: ${short(values[i])}`)));
		});
		if (i % every === 0) svg.append(...wrapped(name, middle, B + 14, most));
	});
	return [svg, ...legend(chart.lines)];
}
const rgb = (text) => text.match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16));
function heatChart(chart, W) {
	const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(), [low, high] = chart.domain;
	const stops = low < 0 ? [style("--s1"), style("--card"), style("--s0")].map(rgb) : style("--ramp").split(",").map((stop) => rgb(stop.trim()));
	const colour = (value) => {
		const place = clamp((value - low) / (high - low || 1), 0, 1) * (stops.length - 1), i = Math.min(Math.floor(place), stops.length - 2);
		return `rgb(${stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * (place - i))).join()})`;
	};
	const names = (list) => Math.max(...list.map((name) => name.length)), L = clamp(7 * names(chart.rows) + 14, 30, W * 0.34), long = names(chart.columns) > 3;
	const T = 22, cell = clamp((W - L - 8) / chart.columns.length, 4, 46), tall = Math.min(cell, 34), B = T + tall * chart.rows.length, H = B + (long ? clamp(7 * names(chart.columns), 20, 110) + 26 : 44);
	const svg = node("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "chart; its numbers are in the table below" });
	chart.values.forEach((row, i) => row.forEach((value, j) => {
		if (value !== null) {
			const rect = node("rect", { x: L + j * cell, y: T + i * tall, width: cell - 0.5, height: tall - 0.5 }, node("title", {}, `${chart.rows[i]}, ${chart.columns[j]}: ${short(value)}`));
			rect.style.fill = colour(value);
			svg.append(rect);
		}
	}));
	const skip = Math.max(1, Math.ceil(13 / tall)), across = Math.max(1, Math.ceil((long ? 13 : 22) / cell));
	chart.rows.forEach((name, i) => i % skip === 0 && svg.append(node("text", { class: "end", x: L - 6, y: T + tall * (i + 0.5) }, name)));
	chart.columns.forEach((name, j) => {
		if (j % across) return;
		const x = L + cell * (j + 0.5), turned = long ? { transform: `rotate(-90 ${x} ${B + 8})`, class: "end" } : { class: "middle" };
		svg.append(node("text", { x, y: long ? B + 8 : B + 12, ...turned }, name.slice(0, 15)));
	});
	svg.append(node("text", { x: 2, y: 8 }, `${chart.y} ↓  ${chart.x} →   colour: ${chart.of}, ${short(low)} to ${short(high)}`));
	return [svg];
}

// ---- the exercise; ladder.js keeps what the reader does

const exercise = document.querySelector(".exercise");
if (exercise) progress.ready.then(() => {
	const [code, hint, done, following] = ["textarea", ".hint", "input[type=checkbox]", ".following"].map((each) => exercise.querySelector(each)), hints = [...exercise.querySelectorAll(".hints li")];
	code.value = progress.of(data.name).code || code.value;
	code.addEventListener("input", () => progress.patch(data.name, { code: code.value }));
	const open = () => {
		const shown = clamp(progress.of(data.name).hints, 0, hints.length);
		hints.forEach((each, i) => {
			each.hidden = i >= shown;
		});
		if (hint) {
			hint.disabled = shown === hints.length;
			hint.textContent = shown === hints.length ? "No more hints" : `A hint (${shown + 1} of ${hints.length})`;
		}
		done.checked = progress.of(data.name).solved;
		following.hidden = !done.checked;
	};
	hint?.addEventListener("click", () => {
		progress.patch(data.name, { hints: progress.of(data.name).hints + 1 });
		open();
	});
	done.addEventListener("change", () => {
		progress.patch(data.name, { solved: done.checked });
		open();
	});
	open();
});

// ---- frames are as tall as what they hold

for (const scene of document.querySelectorAll("iframe.scene")) {
	const fit = () => {
		const inner = scene.contentDocument?.documentElement;
		if (inner) scene.style.height = `${Math.ceil(inner.getBoundingClientRect().height) + 8}px`;
	};
	const watch = () => {
		if (!scene.contentDocument?.body) return;
		new ResizeObserver(fit).observe(scene.contentDocument.documentElement);
		fit();
	};
	scene.addEventListener("load", watch);
	watch();
}

let wide = 0;
const redraw = () => document.querySelectorAll("[data-chart]").forEach(draw);
new ResizeObserver(([entry]) => {
	if (Math.abs(entry.contentRect.width - wide) < 1) return;
	wide = entry.contentRect.width;
	redraw();
}).observe(document.querySelector("main"));
document.addEventListener("toggle", (event) => event.target.querySelectorAll?.("[data-chart]").forEach(draw), true);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.querySelectorAll("[data-control]").forEach(place);
Promise.all([unpacked(data.pieces), progress.ready]).then(([found]) => {
	pieces = found;
	redraw(); // those that no state replaces, before the page calls itself ready
	document.body.dataset.ready = "yes";
	move(read());
});

// Charts from plain data: no library, no request, no markup made from data.
//
//   bars(host, {bars: [{name, value, ours or tone, note}], gutter})
//   lineChart(host, {series: [{name, tone, x: {step}, y}], references: [{name, value}], log, zero}, state)
//   strips(host, {x: {step}, layers: [[value]], names, last, least, most}, state)
//
// Each returns a function that draws, again after a change of state.axis ("step", "tokens",
// "elapsed"), width or colours. attention_map.js and heat_map.js have the other views.

const SVG = "http://www.w3.org/2000/svg"; // a namespace, never fetched
const SHAPES = ["svg", "g", "path", "line", "rect", "circle", "text"];

function node(name, attributes = {}, ...children) {
	const element = SHAPES.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
	for (const key in attributes) element.setAttribute(key, attributes[key]);
	element.append(...children);
	return element;
}
const box = (name, ...children) => node("div", { class: name }, ...children);
const output = () => node("output", { class: "readout" });
const range = (count) => Array.from({ length: count }, (_, i) => i);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const widthOf = (host) => Math.max(host.clientWidth, 240);

function digits(value) {
	if (value === null) return "not finite";
	const size = Math.abs(value);
	if (size && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
	return size < 1000 ? String(+value.toPrecision(4)) : Math.round(value).toLocaleString("en");
}

function compact(value) {
	const size = Math.abs(value);
	if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(0);
	for (const [unit, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return +(value / unit).toFixed(2) + prefix;
	return String(+value.toPrecision(4));
}

function clock(seconds) {
	const all = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
	const minutes = Math.floor(all / 60), tail = ":" + pad(all % 60);
	return minutes < 60 ? minutes + tail : `${Math.floor(minutes / 60)}:${pad(minutes % 60)}${tail}`;
}

const AXES = {
	step: { name: "step", long: digits, short: (n) => (n < 1e4 ? digits(n) : compact(n)) },
	tokens: { name: "tokens", long: compact, short: compact },
	elapsed: { name: "time", long: clock, short: clock, sixty: true },
};
function axisOf(x, state) {
	const axis = x[state.axis] ? state.axis : "step";
	return { axis, ...AXES[axis] };
}

function ticks(low, high, count, sixty) {
	const rough = (high - low) / count || 1, clocked = sixty && rough > 1;
	const base = clocked ? 60 ** Math.floor(Math.log(rough) / Math.log(60)) : 10 ** Math.floor(Math.log10(rough));
	const step = base * (clocked ? [1, 2, 5, 10, 15, 30, 60] : [1, 2, 5, 10]).find((n) => n * base >= rough * 0.999);
	const first = Math.ceil(low / step - 1e-9);
	return range(Math.floor(high / step + 1e-9) - first + 1).map((i) => (first + i) * step);
}

function logTicks(low, high, count) {
	const inside = (...steps) => range(99).flatMap((i) => steps.map((n) => n * 10 ** (i - 49))).filter((n) => n >= low && n <= high);
	const tens = inside(1), many = inside(1, 2, 5), apart = Math.ceil(tens.length / count);
	return many.length < 3 ? ticks(low, high, count) : many.length > count ? tens.filter((_, i) => !(i % apart)) : many;
}

function scale(low, high, from, to, log) {
	const f = log ? Math.log : Number, span = f(high) - f(low);
	return (value) => (span ? from + ((f(value) - f(low)) / span) * (to - from) : (from + to) / 2);
}

const nearest = (places, value) => places.reduce((best, place, i) => (Math.abs(place - value) < Math.abs(places[best] - value) ? i : best), 0);

// Calls move(right, down) on arrow keys, Home and End.
function onArrows(element, move) {
	const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] };
	element.addEventListener("keydown", (event) => {
		if (!keys[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
		event.preventDefault();
		move(...keys[event.key]);
	});
}

// Calls move(across, down) with the pointer's place as shares of the element.
function onMove(element, move) {
	for (const kind of ["pointermove", "pointerdown"])
		element.addEventListener(kind, (event) => {
			const at = element.getBoundingClientRect();
			move((event.clientX - at.left) / at.width, (event.clientY - at.top) / at.height);
		});
}

const operable = (host) => ({ tabindex: 0, role: "application", "aria-label": `${host.getAttribute("aria-label")}; arrow keys move` });
const frame = (width, height, attributes) => node("svg", { viewBox: `0 0 ${width} ${height}`, ...attributes });

function colours() {
	const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(name).trim();
	const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));
	return { ink: read("--ink"), muted: read("--muted"), accent: read("--accent"), alert: read("--alert"), ramp: read("--ramp").split(",").map(rgb), signs: ["--s1", "--card", "--s0"].map(read).map(rgb) };
}

function shade(ramp, t) {
	const at = clamp(t, 0, 1) * (ramp.length - 1), i = Math.min(Math.floor(at), ramp.length - 2);
	return ramp[i].map((low, c) => Math.round(low + (ramp[i + 1][c] - low) * (at - i)));
}

const inkOn = ([r, g, b]) => (3 * r + 6 * g + b > 1250 ? "#111" : "#fff"); // legible on a shade
const css = (rgb) => `rgb(${rgb.join(" ")})`;

function context(canvas, width, height) {
	const ratio = Math.max(2, devicePixelRatio); // for print
	Object.assign(canvas, { width: width * ratio, height: height * ratio });
	const pen = canvas.getContext("2d");
	pen.scale(ratio, ratio);
	pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
	pen.textBaseline = "middle";
	return pen;
}

const rampBar = (low, high, signs) => node("p", { class: "ramp" }, ...(low === high ? [low, " everywhere"] : [low, node("i", signs ? { class: "signs" } : {}), high]));

export function bars(host, data) {
	const most = Math.max(...data.bars.map((bar) => bar.value), 1e-12);
	return () => {
		const width = widthOf(host), row = 40, gutter = Math.min(data.gutter ?? 110, width * 0.45);
		const tail = Math.max(...data.bars.map(({ note = "" }) => 58 + 8 * note.length)), room = width - gutter - tail;
		const label = data.bars.map((bar) => `${bar.name} ${digits(bar.value)}`).join(", ");
		const chart = frame(width, data.bars.length * row, { role: "img", "aria-label": label });
		data.bars.forEach(({ name, value, ours, tone, note = "" }, i) => {
			const y = (i + 0.5) * row, length = Math.max((value / most) * room, 1), kind = tone === undefined ? (ours ? "ours" : "") : `s${tone}`;
			chart.append(
				node("text", { x: gutter - 10, y, class: `label end ${kind}` }, name),
				node("rect", { x: gutter, y: y - 11, width: length, height: 22, class: `bar ${kind}` }),
				node("text", { x: gutter + length + 8, y, class: `label ${kind}` }, `${value.toFixed(3)} ${note}`.trim()));
		});
		host.replaceChildren(chart);
	};
}

export function lineChart(host, data, state) {
	const plot = box("plot"), readout = output(), legend = node("ul", { class: "legend" }), { series, references, log } = data;
	const key = (kind, text) => legend.append(node("li", { class: `key ${kind}` }, text));
	series.forEach((one) => key(`s${one.tone}`, one.name));
	references.forEach((one, i) => key(`r${i % 3}`, `${one.name} ${digits(one.value)}`));
	host.replaceChildren(legend, plot, readout);
	const drawable = (y) => y !== null && (!log || y > 0);
	let at = null; // the chosen index; null is the last

	return () => {
		const { axis, name, long, short, sixty } = axisOf(series[0].x, state);
		const width = widthOf(plot), height = width > 700 ? 300 : 200;
		const left = 46, right = width - 14, top = 10, bottom = height - 30;
		const xs = series.flatMap((one) => one.x[axis]), first = Math.min(...xs), end = Math.max(...xs);
		const ys = series.flatMap((one) => one.y).concat(references.map((one) => one.value)).filter(drawable);
		let low = Math.min(...ys), high = Math.max(...ys);
		const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
		if (log) [low, high] = [low / 1.08, high * 1.08];
		else [low, high] = [low < 0 ? low - pad : data.zero ? 0 : Math.max(low - pad, 0), high + pad];
		const X = scale(first, end, left, right), Y = scale(low, high, bottom, top, log);
		const chart = frame(width, height, operable(host));
		const level = (y, kind) => node("line", { x1: left, x2: right, y1: Y(y), y2: Y(y), class: kind });
		const dot = (one, j, r) => node("circle", { cx: X(one.x[axis][j]), cy: Y(one.y[j]), r, class: `dot s${one.tone}` });

		for (const y of (log ? logTicks : ticks)(low, high, height / 45))
			chart.append(level(y, "rule"), node("text", { x: left - 8, y: Y(y), class: "end" }, compact(y)));
		for (const x of ticks(first, end, width / 110, sixty))
			chart.append(node("text", { x: X(x), y: bottom + 18, class: X(x) > right - 20 ? "end" : "middle" }, short(x)));
		references.forEach((one, i) => chart.append(level(one.value, `reference r${i % 3}`)));
		for (const one of series) {
			let path = "", pen = "M";
			one.y.forEach((y, j) => {
				if (drawable(y)) path += `${pen}${X(one.x[axis][j]).toFixed(1)} ${Y(y).toFixed(1)}`;
				pen = drawable(y) ? "L" : "M";
			});
			chart.append(node("path", { d: path, class: `line s${one.tone}` }));
			if (one.y.length <= 40) one.y.forEach((y, j) => drawable(y) && chart.append(dot(one, j, 2.6)));
		}

		const mark = node("g"), guide = [...new Set(xs)].sort((a, b) => a - b), count = guide.length;
		function point(place) {
			at = place;
			const here = guide[at ?? count - 1];
			mark.replaceChildren();
			if (at !== null) mark.append(node("line", { x1: X(here), x2: X(here), y1: top, y2: bottom, class: "cursor" }));
			const words = series.map((one) => {
				const j = nearest(one.x[axis], here);
				if (at !== null && drawable(one.y[j])) mark.append(dot(one, j, 4));
				const x = one.x[axis][j];
				return `${one.name} ${digits(one.y[j])}${x === here ? "" : ` (at ${long(x)})`}`;
			});
			readout.textContent = `${name} ${long(here)}: ${words.join(", ")}`;
		}
		chart.append(mark);
		onMove(chart, (x) => point(nearest(guide.map(X), x * width)));
		chart.addEventListener("pointerleave", () => point(null));
		onArrows(chart, (right) => point(clamp((at ?? count - 1) + right * Math.ceil(count / 200), 0, count - 1)));
		plot.replaceChildren(chart);
		point(at);
	};
}

export function strips(host, data, state) {
	const canvas = node("canvas", operable(host)), readout = output();
	host.replaceChildren(canvas, box("under", readout, rampBar(digits(data.least), digits(data.most))));
	const count = data.layers.length, columns = data.x.step.length, left = 50;
	const row = clamp(Math.round(200 / count), 5, 26), skip = Math.ceil(12 / row);
	let layer = count - 1, column = columns - 1, place;

	function draw() {
		const { axis, name, long, short, sixty } = axisOf(data.x, state), paint = colours();
		const width = widthOf(host), right = width - 54, height = count * row + 26, pen = context(canvas, width, height);
		const [first, second] = data.x[axis], before = first - (second - first || 1);
		const edges = [first > 0 ? Math.max(before, 0) : before, ...data.x[axis]]; // a value stands at the end of its span
		const X = scale(edges[0], edges[columns], left, right), heat = scale(data.least, data.most, 0, 1);
		data.layers.forEach((values, i) => {
			values.forEach((value, j) => {
				pen.fillStyle = value === null ? paint.alert : css(shade(paint.ramp, heat(value)));
				pen.fillRect(X(edges[j]), i * row, X(edges[j + 1]) - X(edges[j]) + 0.5, row - (row > 9 ? 2 : 0));
			});
			if (i % skip) return;
			const y = Math.max((i + 0.5) * row - 1, 6);
			pen.fillStyle = paint.muted;
			pen.fillText(data.names[i], 0, y);
			pen.fillStyle = paint.ink;
			pen.fillText(digits(data.last[i]), right + 8, y, 46);
		});
		pen.fillStyle = paint.muted;
		pen.textAlign = "center";
		for (const x of ticks(edges[0], edges[columns], width / 120, sixty)) pen.fillText(short(x), X(x), count * row + 12);
		pen.strokeStyle = paint.accent;
		if (canvas.matches(":focus, :hover")) pen.strokeRect(X(edges[column]), layer * row, Math.max(X(edges[column + 1]) - X(edges[column]), 2), row - 2);
		place = (x, y) => [edges.filter((edge) => X(edge) <= x * width).length - 1, Math.floor((y * height) / row)];
		readout.textContent = `${name} ${long(data.x[axis][column])}, ${data.names[layer]}: ${digits(data.layers[layer][column])}`;
	}
	function move(j, i) {
		[column, layer] = [clamp(j, 0, columns - 1), clamp(i, 0, count - 1)];
		draw();
	}
	onMove(canvas, (x, y) => move(...place(x, y)));
	for (const event of ["pointerleave", "focus", "blur"]) canvas.addEventListener(event, draw);
	onArrows(canvas, (right, down) => move(column + right, layer + down));
	return draw;
}

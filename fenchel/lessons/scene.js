// Drawings that can be grasped: SVG in a fixed frame, no library, no request.
//
//   scene(host, { x: [0, 1], y: [0, 1], label, axes, ratio, equal, state, draw, handles, changed })
//     draw(pen, state) draws everything anew after every change, in the units of the frame, with
//       pen.region(points, o)  pen.curve(points, o)  pen.points(points, o)  pen.line(a, b, o)
//       pen.arrow(a, b, o)     pen.dot(at, o)        pen.text(at, words, o)
//       pen.contours(f, levels, o)
//     o: tone ("s0" to "s7", "ink", "muted"), width, dash, opacity, radius, hollow, anchor, dx, dy.
//     handles: { name: { at(state), move(state, [x, y]), say(state), label, tone, letter, step, keys } };
//       move and keys(state, way, far) return what changes in the state.
//     axes: { x, y, xTicks, yTicks, gap }. equal: one scale for both axes. open: no clipping.
//   words(host, { tokens, label, causal, changed }).show(query, rows, tone)
//     a sentence of buttons; lines as thick as rows[query] join the query with the words it reads
//   bars(host, [{ name, tone }])(values)     shares on an axis from 0 to 1
//   slider(host, of, {...})  radios(host, of, {...})  of.play(button, {...})      controls of a state
//   share(of, names)     the state in the address of the page, or in Python where a lesson holds it
//
// A scene returns its store: { state, set(patch), watch(f), play }. Scenes that are given one `store`
// show one state. A handle is a slider for a screen reader: arrow keys move it (Shift: five times as
// far) and its value is read aloud. Only handles keep a finger from scrolling. Type has its size on a
// phone too, because the frame is laid out in real pixels.

const SVG = "http://www.w3.org/2000/svg"; // a namespace, never fetched
const SHAPES = ["svg", "g", "path", "line", "circle", "text", "rect", "defs", "clipPath"];

function node(name, attributes = {}, ...children) {
	const made = SHAPES.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
	for (const key in attributes) if (attributes[key] !== undefined) made.setAttribute(key, attributes[key]);
	made.append(...children);
	return made;
}
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const range = (count) => Array.from({ length: count }, (_, i) => i);
const between = (low, high, count) => range(count).map((i) => low + ((high - low) * i) / (count - 1));
const arc = ([x, y], radius, start, end, count = 97) =>
	between(start, end, count).map((a) => [x + radius * Math.cos(a), y + radius * Math.sin(a)]);
const circle = (at, radius) => arc(at, radius, 0, 2 * Math.PI);
const signed = (text) => text.replace(/^-(0(\.0*)?)$/, "$1").replace("-", "\u2212"); // no -0, a true minus
const fixed = (value, digits = 2) => signed(value.toFixed(digits));
const NARROW = 520;
let scenes = 0;

// store: a state, those who follow it, and one of its values in motion.
// In the web edition (DATA.places) the state is always one of the places at which sentences are stored.
function placesOf(start) {
	const places = typeof DATA === "undefined" ? null : DATA.places;
	if (!places) return null;
	const names = Object.keys(places[0]), numbers = names.filter((name) => typeof start[name] === "number");
	const widths = numbers.map((name) => {
		const values = places.map((place) => place[name]);
		return Math.max(...values) - Math.min(...values) || 1;
	});
	const far = (place, at) =>
		numbers.reduce((sum, name, i) => sum + ((place[name] - at[name]) / widths[i]) ** 2, 0) +
		names.reduce((sum, name) => sum + (typeof start[name] !== "number" && place[name] !== at[name] ? 100 : 0), 0);
	const nearest = (at) => places.reduce((best, place) => (far(place, at) < far(best, at) ? place : best));
	return {
		nearest,
		next(state, patch) { // a key moves on: on the way of the patch, to the first place that is another
			for (let reach = 1; reach <= 256; reach *= 1.5) {
				const at = { ...state, ...patch };
				for (const name of numbers) at[name] = state[name] + reach * (at[name] - state[name]);
				const place = nearest(at);
				if (names.some((name) => place[name] !== state[name])) return place;
			}
			return {};
		},
	};
}

function store(start) {
	const state = { ...start }, watchers = [], places = placesOf(start);
	let waiting = false, stop = () => {};
	function tell() {
		waiting = false;
		for (const watcher of watchers) watcher(state);
	}
	function set(patch, by) {
		if (places) patch = { ...patch, ...(by === "key" ? places.next(state, patch) : places.nearest({ ...state, ...patch })) };
		Object.assign(state, patch);
		if (by !== "play") stop();
		if (!waiting) requestAnimationFrame(tell); // many events, one drawing per frame
		waiting = true;
	}
	function watch(watcher) {
		watchers.push(watcher);
		watcher(state);
	}
	// Moves state[name] from one end to the other; the ends may be functions of the state, `whole` rounds.
	// Who asks for no motion gets five still pictures.
	function play(button, { name, from, to, seconds = 5, log, whole, words: [start, pause] = ["Play", "Pause"] }) {
		const ends = () => [from, to].map((end) => (typeof end === "function" ? end(state) : end));
		function at(t) {
			const [a, b] = ends(), value = log ? a * (b / a) ** t : a + (b - a) * t;
			return whole ? Math.round(value) : value;
		}
		function share(value) {
			const [a, b] = ends();
			return log ? Math.log(value / a) / Math.log(b / a) : (value - a) / (b - a);
		}
		const calm = matchMedia("(prefers-reduced-motion: reduce)");
		let running = 0;
		function label(on) {
			button.textContent = on ? `\u275a\u275a ${pause}` : `\u25b6 ${start}`;
			button.setAttribute("aria-pressed", on);
		}
		function end() {
			cancelAnimationFrame(running);
			clearTimeout(running);
			running = 0;
			label(false);
		}
		button.addEventListener("click", () => {
			if (running) return end();
			stop();
			stop = end;
			let t = clamp(share(state[name]), 0, 1), before = null;
			if (t > 0.98) t = 0;
			label(true);
			const next = (frame) => (calm.matches ? setTimeout(frame, 700) : requestAnimationFrame(frame));
			function frame(now) {
				t = Math.min(1, t + (calm.matches ? 0.2 : before === null ? 0 : (now - before) / 1000 / seconds));
				before = now;
				set({ [name]: at(t) }, "play");
				if (t < 1) running = next(frame);
				else end();
			}
			running = next(frame);
			return null;
		});
		label(false);
	}
	return { state, set, watch, play };
}

function scene(host, spec) {
	const held = spec.store || store(spec.state), { state, set } = held;
	const id = `scene${scenes++}`, [x0, x1] = spec.x, [y0, y1] = spec.y;
	const margin = { left: 46, right: 16, top: 26, bottom: 40, ...spec.margin };
	const hole = node("rect"), cut = node("clipPath", { id: `${id}-cut` });
	const back = node("g"), marks = node("g", { "clip-path": `url(#${id}-frame)` }), over = node("g"), grips = node("g");
	const defs = node("defs", {}, node("clipPath", { id: `${id}-frame` }, hole), cut);
	const svg = node("svg", { class: "scene", role: "group", "aria-label": spec.label }, defs, back, marks, over, grips);
	host.append(svg);
	let W = 0, H = 0, X = [0, 1], Y = [1, 0], grid = {};
	const toX = (x) => X[0] + ((x - x0) / (x1 - x0)) * (X[1] - X[0]);
	const toY = (y) => Y[0] + ((y - y0) / (y1 - y0)) * (Y[1] - Y[0]);
	const from = (px, py) => [
		x0 + ((px - X[0]) / (X[1] - X[0])) * (x1 - x0),
		y0 + ((py - Y[0]) / (Y[1] - Y[0])) * (y1 - y0),
	];

	function layout() {
		W = Math.max(260, host.clientWidth);
		const inner = W - margin.left - margin.right, ratio = (W < NARROW && spec.ratioNarrow) || spec.ratio || 0.62;
		H = spec.equal ? (inner * (y1 - y0)) / (x1 - x0) + margin.top + margin.bottom : Math.round(W * ratio);
		X = [margin.left, W - margin.right];
		Y = [H - margin.bottom, margin.top];
		svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
		const edge = spec.open ? 400 : 1;
		const frame = { x: X[0] - edge, y: Y[1] - edge, width: inner + 2 * edge, height: Y[0] - Y[1] + 2 * edge };
		for (const key in frame) hole.setAttribute(key, frame[key]);
		back.replaceChildren();
		const axes = spec.axes || {}, every = W < NARROW && (axes.xTicks || []).length > 7 ? 2 : 1;
		for (const [i, v] of (axes.xTicks || []).entries()) {
			back.append(node("line", { class: "grid", x1: toX(v), x2: toX(v), y1: Y[0], y2: Y[1] }));
			if (i % every === 0)
				back.append(node("text", { class: "tick middle", x: toX(v), y: Y[0] + 14 }, signed(String(v))));
		}
		for (const v of axes.yTicks || [])
			back.append(
				node("line", { class: "grid", x1: X[0], x2: X[1], y1: toY(v), y2: toY(v) }),
				node("text", { class: "tick end", x: X[0] - (axes.gap || 8), y: toY(v) }, signed(String(v))),
			);
		if (axes.x) back.append(node("text", { class: "axis-name end", x: X[1], y: Y[0] + 32 }, axes.x));
		if (axes.y) back.append(node("text", { class: "axis-name", x: 2, y: 9 }, axes.y));
	}

	const paint = (o, otherwise = "ink") => `var(--${o.tone || otherwise})`;
	const stroke = (o) => ({
		stroke: paint(o),
		"stroke-width": o.width || 1.6,
		"stroke-dasharray": o.dash,
		"stroke-linejoin": "round",
		"stroke-linecap": o.dash ? "butt" : "round",
		opacity: o.opacity,
		fill: "none",
	});
	const path = (points, close) =>
		points.map((p, i) => `${i ? "L" : "M"}${toX(p[0]).toFixed(1)} ${toY(p[1]).toFixed(1)}`).join("") + (close ? "Z" : "");
	const put = (layer, made) => {
		layer.append(made);
		return made;
	};
	const pen = {
		get narrow() {
			return W < NARROW;
		},
		px: (pixels) => (pixels / (X[1] - X[0])) * (x1 - x0), // a length in pixels, in units of x
		region: (points, o = {}) =>
			put(marks, node("path", { d: path(points, true), fill: paint(o), opacity: o.opacity ?? 0.1 })),
		curve: (points, o = {}) => put(marks, node("path", { d: path(points, o.close), ...stroke(o) })),
		line: (a, b, o = {}) => put(marks, node("path", { d: path([a, b]), ...stroke(o) })),
		points(points, o = {}) { // one path for all: a thousand points cost as much as one
			const r = o.radius || 1.4;
			const disc = `a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
			const d = points.map((p) => `M${(toX(p[0]) - r).toFixed(1)} ${toY(p[1]).toFixed(1)}${disc}`).join("");
			return put(marks, node("path", { d, fill: paint(o, "muted"), opacity: o.opacity ?? 0.5 }));
		},
		dot(at, o = {}) {
			const [fill, line] = o.hollow ? ["var(--paper)", paint(o)] : [paint(o), "var(--paper)"];
			const drawn = { r: o.radius || 4, fill, stroke: line, "stroke-width": o.hollow ? 2 : 1.5, opacity: o.opacity };
			return put(over, node("circle", { cx: toX(at[0]), cy: toY(at[1]), ...drawn }));
		},
		arrow(a, b, o = {}) {
			const [px, py, qx, qy] = [toX(a[0]), toY(a[1]), toX(b[0]), toY(b[1])], long = Math.hypot(qx - px, qy - py);
			if (long < 2) return null;
			const width = o.width || 2.2, size = Math.min(4.5 * width, long), ux = (qx - px) / long, uy = (qy - py) / long;
			const [ex, ey, s] = [qx - ux * size, qy - uy * size, size * 0.42];
			const head = `M${qx} ${qy}L${ex - uy * s} ${ey + ux * s}L${ex + uy * s} ${ey - ux * s}Z`;
			put(over, node("path", { d: `M${px} ${py}L${ex} ${ey}`, ...stroke({ ...o, width }) }));
			return put(over, node("path", { d: head, fill: paint(o), opacity: o.opacity }));
		},
		// Marching squares; NaN lies outside. The same o.key means the same f: its values are kept.
		contours(f, levels, o = {}) {
			const n = o.cells || 72, xs = between(x0, x1, n + 1), ys = between(y0, y1, n + 1);
			if (o.key === undefined || o.key !== grid.key) grid = { key: o.key, v: ys.map((y) => xs.map((x) => f(x, y))) };
			const v = grid.v;
			for (const level of levels) {
				let d = "";
				for (let j = 0; j < n; j++)
					for (let i = 0; i < n; i++) {
						const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]].map(([a, b]) => [xs[a], ys[b], v[b][a]]);
						if (corners.some((c) => Number.isNaN(c[2]))) continue;
						const ends = [];
						for (let k = 0; k < 4; k++) {
							const a = corners[k], b = corners[(k + 1) % 4], t = (level - a[2]) / (b[2] - a[2]);
							if (a[2] < level !== b[2] < level) ends.push([a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])]);
						}
						for (let k = 0; k + 1 < ends.length; k += 2) d += path([ends[k], ends[k + 1]]);
					}
				const drawn = { d, "clip-path": o.clip && `url(#${id}-cut)` };
				put(marks, node("path", { ...drawn, ...stroke({ tone: "muted", width: 1, ...o }) }));
			}
			if (o.clip) cut.replaceChildren(node("path", { d: path(o.clip, true) }));
		},
		text(at, words, o = {}) {
			const place = { x: toX(at[0]) + (o.dx || 0), y: toY(at[1]) + (o.dy || 0), fill: paint(o) };
			const kind = `word ${o.anchor || "start"}${o.halo === false ? "" : " halo"}${o.bold ? " bold" : ""}`;
			const made = put(over, node("text", { class: kind, ...place }, words));
			if (o.size) made.style.fontSize = `${o.size}px`;
			return made;
		},
	};

	const handles = Object.entries(spec.handles || {}).map(([name, of]) => {
		const ring = node("circle", { class: "grip-ring", r: of.radius || (of.letter ? 11 : 9) });
		const group = node("g", { class: "grip", tabindex: 0, role: "slider", "aria-label": of.label, "data-handle": name });
		group.append(node("circle", { class: "grip-area", r: 22 }), ring);
		group.style.setProperty("--tone", `var(--${of.tone || "accent"})`);
		if (of.letter) group.append(node("text", { class: "grip-letter middle" }, of.letter));
		grips.append(group);
		const move = (at, by) => set(of.move(state, at) || {}, by);
		const at = (event) => {
			const box = svg.getBoundingClientRect();
			return from(((event.clientX - box.left) * W) / box.width, ((event.clientY - box.top) * H) / box.height);
		};
		let grasp = null; // from the finger to the centre: a handle that is grasped off its centre does not jump
		group.addEventListener("pointerdown", (event) => {
			event.preventDefault();
			group.setPointerCapture(event.pointerId);
			group.focus({ preventScroll: true, focusVisible: false });
			const here = of.at(state), there = at(event);
			grasp = [here[0] - there[0], here[1] - there[1]];
			group.classList.add("held");
		});
		group.addEventListener("pointermove", (event) => {
			if (!grasp) return;
			const there = at(event);
			move([there[0] + grasp[0], there[1] + grasp[1]]);
		});
		for (const end of ["pointerup", "pointercancel"])
			group.addEventListener(end, () => {
				grasp = null;
				group.classList.remove("held");
			});
		group.addEventListener("keydown", (event) => {
			const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
			if (!way) return;
			event.preventDefault();
			const far = event.shiftKey ? 5 : 1;
			if (of.keys) set(of.keys(state, way[0] + way[1], far), "key");
			else {
				const here = of.at(state), [dx, dy] = of.step || [(x1 - x0) / 100, (y1 - y0) / 100];
				move([here[0] + way[0] * dx * far, here[1] + way[1] * dy * far], "key");
			}
		});
		return { of, group };
	});

	function draw() {
		if (host.clientWidth !== W) layout();
		marks.replaceChildren();
		over.replaceChildren();
		spec.draw(pen, state);
		for (const { of, group } of handles) {
			const [x, y] = of.at(state);
			group.setAttribute("transform", `translate(${toX(x).toFixed(1)} ${toY(y).toFixed(1)})`);
			group.setAttribute("aria-valuetext", of.say(state));
		}
		if (spec.changed) spec.changed(state);
	}
	layout();
	held.watch(draw);
	new ResizeObserver(() => host.clientWidth !== W && draw()).observe(host);
	return { ...held, svg };
}

function words(host, spec) {
	const svg = node("svg", { class: "threads", "aria-hidden": "true" });
	const line = node("p", { class: "words", role: "radiogroup", "aria-label": spec.label });
	const box = node("div", { class: "words-box" }, svg, line);
	const buttons = spec.tokens.map((token, i) => {
		const button = node("button", { type: "button", role: "radio" }, node("span", {}, token), node("small"));
		button.addEventListener("click", () => spec.changed(i));
		button.addEventListener("keydown", (event) => {
			const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
			if (!way) return;
			event.preventDefault();
			const to = clamp(i + way, 0, buttons.length - 1);
			spec.changed(to);
			buttons[to].focus();
		});
		// A full stop stays on the line of its word.
		if (/^[.,;:!?]$/.test(token) && line.lastElementChild) line.lastElementChild.append(button);
		else line.append(node("span", { class: "keep" }, button), " ");
		return button;
	});
	host.append(box);
	let last = null;
	function join(a, b, p, tone) {
		let d;
		if (a === b) d = `M${a.x - 9} ${a.top}C${a.x - 20} ${a.top - 26} ${a.x + 20} ${a.top - 26} ${a.x + 9} ${a.top}`;
		else if (Math.abs(a.top - b.top) < 4) {
			const up = clamp(22 + Math.abs(a.x - b.x) * 0.08, 24, 72);
			d = `M${a.x} ${a.top}C${a.x} ${a.top - up} ${b.x} ${b.top - up} ${b.x} ${b.top}`;
		} else {
			const [start, end] = a.top > b.top ? [a.top, b.low] : [a.low, b.top], middle = (start + end) / 2;
			d = `M${a.x} ${start}C${a.x} ${middle} ${b.x} ${middle} ${b.x} ${end}`;
		}
		const drawn = { fill: "none", stroke: `var(--${tone})`, "stroke-linecap": "round", opacity: 0.35 + 0.6 * p };
		svg.append(node("path", { d, "stroke-width": Math.max(0.75, 11 * p).toFixed(2), ...drawn })); // no line: exactly 0
	}
	function show(query, rows, tone = "s0") {
		last = [query, rows, tone];
		const frame = box.getBoundingClientRect();
		const at = buttons.map((button) => {
			const { left, top, bottom, width } = button.getBoundingClientRect();
			return { x: left - frame.left + width / 2, top: top - frame.top, low: bottom - frame.top };
		});
		svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
		svg.style.height = `${frame.height}px`;
		svg.replaceChildren();
		rows[query].forEach((p, j) => p > 0 && join(at[query], at[j], p, tone));
		buttons.forEach((button, j) => {
			const p = rows[query][j] ?? 0, open = j <= query || !spec.causal;
			button.setAttribute("aria-checked", j === query);
			button.tabIndex = j === query ? 0 : -1;
			button.className = (j === query ? "query " : "") + (!open ? "ahead" : p === 0 ? "none" : "");
			button.style.setProperty("--p", p);
			button.style.setProperty("--tone", `var(--${tone})`);
			button.lastChild.textContent = !open ? "" : p === 0 ? "0" : p < 0.005 ? "<1%" : `${Math.round(100 * p)}%`;
		});
	}
	new ResizeObserver(() => last && show(...last)).observe(box);
	return { show };
}

function bars(host, rows) {
	const made = rows.map(({ name, tone }) => {
		const fill = node("i"), value = node("b");
		fill.style.background = `var(--${tone || "s0"})`;
		host.append(node("div", { class: "bar-row" }, node("span", {}, name), node("div", { class: "bar-track" }, fill), value));
		return { fill, value };
	});
	host.append(node("div", { class: "scale", "aria-hidden": "true" }, node("span", {}, "0"), node("span", {}, "1")));
	return (values) =>
		made.forEach(({ fill, value }, i) => {
			fill.style.width = `${100 * values[i]}%`;
			value.textContent = values[i] === 0 ? "0" : fixed(values[i], 3);
		});
}

// slider: the twin of a handle, for a value of the state from `low` to `high`.
function slider(host, of, { name, label, low, high, step = 0, log, digits = 2 }) {
	const to = (t) => (log ? low * (high / low) ** t : low + (high - low) * t);
	const back = (v) => (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
	const input = node("input", { type: "range", min: 0, max: 1, "aria-label": label, "data-value": name });
	input.step = step ? step / (high - low) : 0.005;
	const shown = node("output");
	let key = false;
	input.addEventListener("keydown", () => (key = true));
	for (const end of ["keyup", "pointerdown"]) input.addEventListener(end, () => (key = false));
	input.addEventListener("input", () => of.set({ [name]: step ? +to(+input.value).toFixed(6) : to(+input.value) }, key && "key"));
	host.append(node("label", { class: "slide" }, node("span", {}, label), input, shown));
	of.watch((state) => {
		input.value = back(state[name]);
		shown.textContent = fixed(state[name], digits);
		input.setAttribute("aria-valuetext", shown.textContent);
	});
}

// radios: one of several values of the state; a menu where there are many.
function radios(host, of, { name, label, options }) {
	if (options.length > 12) {
		const menu = node("select", { "aria-label": label }, ...options.map(([, text], i) => node("option", { value: i }, text)));
		menu.addEventListener("change", () => of.set({ [name]: options[menu.value][0] }));
		host.append(node("label", { class: "menu" }, node("span", {}, label), menu));
		return of.watch((state) => (menu.value = options.findIndex(([value]) => value === state[name])));
	}
	const set = node("fieldset", { class: "choice" }, node("legend", {}, label));
	const inputs = options.map(([value, text, tone]) => {
		const input = node("input", { type: "radio", name, value });
		input.addEventListener("change", () => of.set({ [name]: value }));
		const item = node("label", {}, input, node("span", {}, text));
		item.style.setProperty("--tone", `var(--${tone || "accent"})`);
		set.append(item);
		return input;
	});
	host.append(set);
	return of.watch((state) => inputs.forEach((input, i) => (input.checked = options[i][0] === state[name])));
}

// stage: the parts of a page with one scene: controls above, the picture, and a margin beside it.
function stage(shape = "") { // "square", "wide" or neither
	const controls = node("div", { class: "controls" }), picture = node("div"), side = node("div", { class: "side" });
	const says = node("output", { class: "says", "aria-live": "polite" });
	const figure = node("figure", { class: `figure ${shape}` }, node("div", {}, picture, says), side);
	document.body.append(controls, figure);
	return {
		controls,
		picture,
		side,
		says,
		button() {
			const made = node("button", { type: "button", class: "play" });
			controls.append(made);
			return made;
		},
		number(text, tone = "ink") { // a large number with its meaning; returns the function that sets it
			const value = node("span", { class: `big ${tone}` });
			side.append(node("p", {}, value, text));
			return (shown) => (value.textContent = shown);
		},
	};
}

// share: who else holds the state. A page of its own has it in its address. In a lesson it goes to
// Python: marimo's hidden text field beside the frame hears an event that its own fields send, at
// most ten times a second. From a file a frame cannot see its page: then it is a message.
function share(of, names = Object.keys(of.state)) {
	const plain = (value) => (typeof value === "number" ? +value.toFixed(6) : value);
	const values = () => Object.fromEntries(names.map((name) => [name, plain(of.state[name])]));
	if (window.parent === window) {
		const given = [...new URLSearchParams(location.hash.slice(1))].filter(([name]) => name in of.state);
		of.set(Object.fromEntries(given.map(([name, text]) => [name, typeof of.state[name] === "number" ? +text : text])));
	}
	let last = JSON.stringify(values()), timer = 0;
	function send() {
		timer = 0;
		const now = JSON.stringify(values());
		if (now === last) return;
		last = now;
		if (window.parent === window) return history.replaceState(null, "", `#${new URLSearchParams(values())}`);
		const held = window.frameElement && window.frameElement.closest(".lesson-scene");
		const field = held && held.querySelector("marimo-text");
		if (!field) return window.parent.postMessage({ scene: document.title, state: values() }, "*");
		const detail = { value: now, element: field };
		return field.dispatchEvent(new CustomEvent("marimo-value-input", { bubbles: true, composed: true, detail }));
	}
	of.watch(() => (timer = timer || setTimeout(send, 100)));
}

// In a lesson the frame is as high as its content, and labels have the page's own colour behind them.
function fit() {
	const frame = window.frameElement;
	if (!frame) return;
	document.documentElement.classList.add("framed");
	const paper = () => document.documentElement.style.setProperty("--paper", getComputedStyle(parent.document.body).backgroundColor);
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(paper, 300));
	paper();
	new ResizeObserver(() => (frame.style.height = `${document.documentElement.offsetHeight}px`)).observe(document.documentElement);
}

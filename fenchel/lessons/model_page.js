// The whole model on one screen: text -> tokens -> vectors -> scores -> weights -> mix -> logits, each opened to its arithmetic.
// Reads the block of data that model_page.py writes; the state of the page is in its address.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg"; // a namespace, never fetched
const TONES = ["s0", "s1"], BAND = 104, TOP = 64, LENS = 152, SHOWN = 96, LEAST = 0.004, LOWEST = 0.1;

function node(name, attributes = {}, ...children) {
	const made = ["svg", "g", "path", "rect", "circle", "text"].includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
	for (const key in attributes) if (attributes[key] !== undefined) made.setAttribute(key, attributes[key]);
	made.append(...children);
	return made;
}
const fixed = (value, digits = 3) => value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "\u2212");
const signed = (value, digits = 3) => (value < 0 ? `(${fixed(value, digits)})` : fixed(value, digits));
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const tokenizer = new Tokenizer(data.tokenizer), weights = unpack(fromBase64(data.weights), data.shapes);
delete data.weights;
const model = new Model(weights, data.settings), whole = new Model(weights, data.settings); // `whole` has no cuts
const piece = (id) => {
	const text = tokenizer.decode([id]);
	return text.replace(/\n/g, "↵").replace(/^ (?=.)/, "").replace(/^ $/, "␣") || "·";
};

// ---- state

const NAMES = ["text", "map", "T", "prior", "token", "layer", "head", "key", "next", "cuts"];
const fresh = () => ({ text: data.examples[0], map: "softmax", T: 1, prior: "uniform", token: null, layer: 2, head: 0, key: null, next: null, cuts: [] });
const state = { ...fresh(), ...read() };

function read() {
	const given = {};
	for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
		if (name === "text") given.text = value;
		if (name === "map" && MAPS[value]) given.map = value;
		if (name === "prior" && PRIORS[value]) given.prior = value;
		if (name === "T" && +value > 0) given.T = clamp(+value, LOWEST, 1 / LOWEST);
		if (name === "layer") given.layer = clamp(Math.trunc(+value) || 0, 0, data.settings.layers - 1);
		if (name === "head") given.head = clamp(Math.trunc(+value) || 0, 0, data.settings.heads - 1);
		if (["token", "key", "next"].includes(name) && +value >= 0) given[name] = Math.trunc(+value);
		if (name === "cuts") given.cuts = value.split(";").map((cut) => cut.split(",").map(Number)).filter((cut) => cut.length === 4 && cut.every((n) => n >= 0));
	}
	return given;
}
function write() {
	const plain = fresh(), kept = new URLSearchParams();
	for (const name of NAMES) {
		const value = name === "cuts" ? state.cuts.map((cut) => cut.join()).join(";") : name === "T" ? +state.T.toFixed(3) : state[name];
		if (value !== null && value !== "" && value !== plain[name]) kept.set(name, value);
	}
	try {
		history.replaceState(null, "", String(kept) ? `#${kept}` : location.pathname + location.search);
	} catch { /* a browser limits how often: the next change writes it */ }
}

// ---- one update: compute, then draw

let ids = [], chosen = 0, key = 0, after = [], before = [];
function update() {
	ids = tokenizer.encode(state.text).slice(-SHOWN);
	const how = { map: state.map, beta: 1 / state.T, prior: state.prior };
	state.cuts = state.cuts.filter(([l, h, i, j]) => i < ids.length && j <= i && l < model.L && h < model.H);
	if (ids.length) {
		model.run(ids, { ...how, cuts: state.cuts });
		if (state.cuts.length) whole.run(ids, how);
	}
	show();
}
function show() {
	const n = ids.length;
	chosen = state.token === null ? n - 1 : Math.min(state.token, n - 1);
	if (n) {
		const p = model.trace[chosen].blocks[state.layer].heads[state.head].p;
		key = state.key === null || state.key > chosen ? p.indexOf(Math.max(...p)) : state.key;
		after = probabilities(model.logits(chosen));
		before = state.cuts.length ? probabilities(whole.logits(chosen)) : after;
	}
	for (const host of ["stack", "next", "heads", "steps", "cuts"]) $(host).replaceChildren();
	$("cell").textContent = "";
	$("said").textContent = n ? "" : "Type a word.";
	if (n) [drawStack, drawNext, drawHeads, drawMatrix, drawSteps, drawCuts].forEach((draw) => draw());
	$("temperature").value = Math.log10(state.T);
	$("temperature-out").textContent = fixed(state.T, 2);
	for (const name of ["map", "prior"]) for (const input of $(name).querySelectorAll("input")) input.checked = input.value === state[name];
	$("reset").classList.toggle("unseen", state.map === "softmax" && state.prior === "uniform" && state.T === 1 && !state.cuts.length);
	write();
}
function set(patch, again = false) {
	Object.assign(state, patch);
	if (again) update();
	else show();
}
const typed = (text) => set({ text, token: null, key: null, next: null, cuts: [] }, true);
const isCut = (l, h, i, j) => state.cuts.some((cut) => cut.join() === [l, h, i, j].join());

// ---- the stack: tokens, blocks, lines

function drawStack() {
	const host = $("stack"), n = ids.length, words = ids.map(piece), widths = words.map((word) => Math.max(24, 8.2 * word.length + 12));
	const room = host.clientWidth - LENS - 8, text = widths.reduce((a, b) => a + b, 0), stretch = clamp(room / text, 1, 1.5), at = [];
	let x = 4;
	for (const width of widths) {
		at.push(x + width * stretch / 2);
		x += width * stretch;
	}
	const W = Math.ceil(x + LENS), H = TOP + model.L * BAND + 12, svg = node("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}` });
	const weak = node("g"), strong = node("g"), grasp = node("g"), ahead = (i) => (i > chosen ? " ahead" : "");
	for (let i = 0; i < n; i++) {
		const column = node("rect", { class: `col${i === chosen ? " chosen" : ""}`, x: at[i] - widths[i] * stretch / 2, y: 0, width: widths[i] * stretch, height: H, rx: 4 });
		column.addEventListener("click", () => set({ token: i === n - 1 ? null : i, key: null, next: null }));
		svg.append(
			column,
			node("text", { class: `tok middle${i === chosen ? " chosen" : ""}${ahead(i)}`, x: at[i], y: 24 }, words[i]),
			node("text", { class: "id middle", x: at[i], y: 43 }, String(ids[i])),
		);
	}
	svg.append(weak, grasp, strong);
	for (let l = 0; l < model.L; l++) {
		const y = TOP + l * BAND, m = y + BAND / 2;
		for (let h = 0; h < model.H; h++) for (let i = 0; i < n; i++) model.trace[i].blocks[l].heads[h].p.forEach((p, j) => {
			const own = i === chosen, cut = isCut(l, h, i, j), shift = h ? 2.5 : -2.5;
			if (p < (own ? LEAST : 0.06) && !cut) return;
			const d = `M${at[j] + shift} ${y + 6}C${at[j] + shift} ${m} ${at[i] + shift} ${m} ${at[i] + shift} ${y + BAND - 6}`;
			(own || cut ? strong : weak).append(node("path", { class: `thread ${TONES[h % 2]}${own ? " strong" : ""}${cut ? " cut" : ""}`, d, "stroke-width": cut ? undefined : (own ? Math.max(0.75, 9 * p) : 3.5 * p).toFixed(2) }));
			if (!own) return;
			const handle = node("path", { class: "grasp", d });
			handle.addEventListener("click", () => set({ layer: l, head: h, key: j }));
			grasp.append(handle);
		});
		const guess = probabilities(model.logits(chosen, l + 1)), [top] = largest(guess, 1);
		svg.append(
			node("text", { x: x + 10, y: m - 10 }, `block ${l + 1}`),
			node("text", { class: "lens", x: x + 10, y: m + 10 }, `${piece(top)}  ${Math.round(100 * guess[top])} %`),
		);
	}
	for (let l = 0; l <= model.L; l++) for (let i = 0; i < n; i++)
		strong.append(node("circle", { class: `knot${ahead(i)}${i === chosen && l === model.L ? " last" : ""}`, cx: at[i], cy: TOP + l * BAND, r: i === chosen ? 4 : 2.4 }));
	host.append(svg);
	host.scrollLeft = at[chosen] - host.clientWidth + LENS + 60 > 0 ? at[chosen] + LENS - host.clientWidth + 40 : 0;
}

// ---- what comes next

function drawNext() {
	const top = largest(after, 8), said = top.slice(), target = state.next ?? top[0];
	if (!said.includes(target)) said[7] = target;
	$("after").textContent = `“${piece(ids[chosen])}”`;
	for (const id of said) {
		const row = bar(piece(id), after[id], before[id], "button");
		row.setAttribute("aria-pressed", id === target);
		row.addEventListener("click", () => set({ next: id }));
		row.addEventListener("dblclick", () => typed(state.text + tokenizer.decode([id])));
		$("next").append(row);
	}
	const rest = 1 - said.reduce((sum, id) => sum + after[id], 0), rested = 1 - said.reduce((sum, id) => sum + before[id], 0);
	const row = bar(`${(model.V - said.length).toLocaleString("en")} others`, Math.max(0, rest), Math.max(0, rested), "div");
	row.classList.add("rest");
	$("next").append(row);
	$("said").textContent = state.cuts.length ? `${cutEffect()} Red marks: before the cut.` : "Click a token to see its logit below; a double click writes it.";
}
function cutEffect() {
	const followed = state.next ?? largest(before, 1)[0], lines = state.cuts.length === 1 ? "the line" : `${state.cuts.length} lines`;
	return `With ${lines} cut, “${piece(followed)}” goes from ${fixed(before[followed])} to ${fixed(after[followed])}.`;
}
function bar(name, value, mark, kind) {
	const fill = node("i"), track = node("span", { class: "track" }, fill);
	fill.style.width = `${100 * value}%`;
	if (mark !== value) {
		const tick = node("em");
		tick.style.left = `${100 * mark}%`;
		track.append(tick);
	}
	return node(kind, { class: "bar-row", type: kind === "button" ? "button" : undefined }, node("span", {}, name), track, node("b", {}, fixed(value)));
}

// ---- heads and the matrix of one

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function ramp() { // a share from 0 to 1 to a colour
	const stops = style("--ramp").split(",").map((stop) => rgb(stop.trim()));
	return (value) => {
		const place = clamp(value, 0, 1) ** 0.5 * (stops.length - 1), i = Math.min(Math.floor(place), stops.length - 2);
		return `rgb(${stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * (place - i))).join()})`;
	};
}
function drawHeads() {
	const host = $("heads"), n = ids.length, colour = ramp();
	host.append(node("span"));
	for (let h = 0; h < model.H; h++) host.append(node("span", {}, `head ${h + 1}`));
	for (let l = 0; l < model.L; l++) {
		host.append(node("span", {}, `block ${l + 1}`));
		for (let h = 0; h < model.H; h++) {
			const side = Math.max(1, Math.floor(88 / n)), canvas = node("canvas", { width: side * n, height: side * n }), pen = canvas.getContext("2d");
			for (let i = 0; i < n; i++) model.trace[i].blocks[l].heads[h].p.forEach((p, j) => {
				pen.fillStyle = colour(p);
				pen.fillRect(j * side, i * side, side, side);
			});
			const mine = l === state.layer && h === state.head;
			const button = node("button", { type: "button", role: "radio", "aria-checked": mine, "aria-label": `block ${l + 1}, head ${h + 1}` }, canvas);
			button.addEventListener("click", () => {
				set({ layer: l, head: h, key: null });
				$("heads").querySelectorAll("button")[l * model.H + h].focus();
			});
			host.append(button);
		}
	}
}
let cellSize = 1, gutter = 0;
function drawMatrix() {
	const canvas = $("matrix"), n = ids.length, colour = ramp(), width = Math.max(240, canvas.parentElement.clientWidth);
	gutter = Math.min(84, width * 0.28);
	cellSize = Math.min(30, (width - gutter) / n);
	const scale = devicePixelRatio || 1, side = gutter + cellSize * n;
	canvas.width = width * scale;
	canvas.height = (cellSize * n + 4) * scale;
	const pen = canvas.getContext("2d"), label = cellSize >= 9;
	pen.scale(scale, scale);
	pen.font = `12px ${style("--sans")}`;
	pen.textAlign = "right";
	pen.textBaseline = "middle";
	for (let i = 0; i < n; i++) {
		const { p } = model.trace[i].blocks[state.layer].heads[state.head];
		p.forEach((value, j) => {
			pen.fillStyle = colour(value);
			pen.fillRect(gutter + j * cellSize, i * cellSize, cellSize - (label ? 1 : 0), cellSize - (label ? 1 : 0));
		});
		if (!label) continue;
		pen.fillStyle = style(i === chosen ? "--accent" : "--muted");
		pen.fillText(piece(ids[i]).slice(0, 11), gutter - 6, (i + 0.5) * cellSize);
	}
	pen.strokeStyle = style("--s1");
	pen.lineWidth = 2;
	pen.strokeRect(gutter + key * cellSize, chosen * cellSize, cellSize, cellSize);
	canvas.dataset.side = side;
	const { p } = model.trace[chosen].blocks[state.layer].heads[state.head];
	$("cell").textContent = `Block ${state.layer + 1}, head ${state.head + 1}: “${piece(ids[chosen])}” reads “${piece(ids[key])}”, ${chosen === key ? "itself" : chosen - key === 1 ? "one token back" : `${chosen - key} tokens back`}, with weight ${fixed(p[key], 4)}.`;
}
const choose = (i, j) => set({ token: i === ids.length - 1 ? null : i, key: clamp(j, 0, i), next: i === chosen ? state.next : null });
$("matrix").addEventListener("click", (event) => {
	const box = event.target.getBoundingClientRect(), shown = box.width / Math.max(240, $("matrix").parentElement.clientWidth);
	const j = Math.floor(((event.clientX - box.left) / shown - gutter) / cellSize), i = Math.floor((event.clientY - box.top) / shown / cellSize);
	if (i >= 0 && i < ids.length && j >= 0 && j <= i) choose(i, j);
});
function keys(host, moves) {
	host.addEventListener("keydown", (event) => {
		const move = moves[event.key];
		if (!move || !ids.length) return;
		event.preventDefault();
		move();
	});
}
keys($("matrix"), {
	ArrowLeft: () => choose(chosen, key - 1),
	ArrowRight: () => choose(chosen, key + 1),
	ArrowUp: () => choose(clamp(chosen - 1, 0, ids.length - 1), key),
	ArrowDown: () => choose(clamp(chosen + 1, 0, ids.length - 1), key),
});
keys($("stack"), {
	ArrowLeft: () => set({ token: Math.max(0, chosen - 1), key: null, next: null }),
	ArrowRight: () => set({ token: chosen + 1 >= ids.length - 1 ? null : chosen + 1, key: null, next: null }),
});

// ---- the arithmetic of one cell

function strip(name, values) { // numbers as colours: orange below 0, blue above
	const canvas = node("canvas", { width: values.length, height: 1, title: name }), pen = canvas.getContext("2d"), top = Math.max(...values.map(Math.abs)) || 1;
	const low = rgb(style("--s1")), high = rgb(style("--s0")), none = rgb(style("--card"));
	values.forEach((value, i) => {
		const end = value < 0 ? low : high, share = Math.abs(value) / top;
		pen.fillStyle = `rgb(${none.map((c, k) => Math.round(c + (end[k] - c) * share)).join()})`;
		pen.fillRect(i, 0, 1, 1);
	});
	canvas.addEventListener("pointermove", (event) => {
		const box = canvas.getBoundingClientRect(), i = clamp(Math.floor((event.clientX - box.left) / box.width * values.length), 0, values.length - 1);
		canvas.title = `${name}, entry ${i + 1} of ${values.length}: ${fixed(values[i], 4)}`;
	});
	return node("div", { class: "strip" }, node("span", {}, name), canvas);
}
const sum = (a, b) => {
	let total = 0;
	for (let i = 0; i < a.length; i++) total += a[i] * b[i];
	return total;
};
const first = (a, b) => `${signed(a[0])} · ${signed(b[0])} + ${signed(a[1])} · ${signed(b[1])} + … `;
function terms(title, names, rows) { // a table that is made when it is opened
	const made = node("details", {}, node("summary", {}, title));
	made.addEventListener("toggle", () => {
		if (made.querySelector("table")) return;
		const line = (kind, cells) => node("tr", {}, ...cells.map((cell) => node(kind, {}, cell)));
		const body = node("tbody", {}, ...rows().map((cells) => line("td", cells)));
		const table = node("table", { class: "numbers" }, node("thead", {}, line("th", names)), body);
		made.append(node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table));
	});
	return made;
}
const step = (title, ...children) => $("steps").append(node("li", {}, node("h3", {}, title), ...children));
const text = (...children) => node("p", {}, ...children);
const formula = (...children) => node("p", { class: "sum" }, ...children);
const strong = (value) => node("b", {}, value);

function drawSteps() {
	const { M, D, L } = model, { layer: l, head: h } = state, at = model.trace[chosen], block = at.blocks[l];
	const head = block.heads[h], from = h * D, here = piece(ids[chosen]), there = piece(ids[key]);
	const q = [...block.q.slice(from, from + D)], k = [...model.k[l].slice(key * M + from, key * M + from + D)], v = [...model.v[l].slice(key * M + from, key * M + from + D)];
	const dot = sum(q, k), z = head.z[key], x = head.x[key], p = head.p[key], logU = PRIORS[state.prior](chosen - key), cut = isCut(l, h, chosen, key);

	step("Token", text(`“${here}” is token ${ids[chosen]} of ${model.V.toLocaleString("en")}, number ${chosen + 1} of ${ids.length} in this text.`));
	step(
		"Vector",
		text(`Row ${ids[chosen]} of the embedding: ${M} numbers. Each block adds to them.`),
		strip("the row", [...at.embedding]),
		strip(`into block ${l + 1}`, [...model.stream(chosen, l)]),
	);
	step(
		"Score",
		text(`The dot product of a query of “${here}” and a key of “${there}”, ${D} numbers each, turned by their positions.`),
		strip("query", q), strip("key", k), strip("products", q.map((value, i) => value * k[i])),
		formula(first(q, k), "= ", strong(fixed(dot)), ` · over √${D} = ${fixed(Math.sqrt(D), 0)}: `, strong(`z = ${fixed(z)}`)),
		terms(`All ${D} products`, ["entry", "query", "key", "product"], () => q.map((value, i) => [String(i + 1), fixed(value, 4), fixed(k[i], 4), fixed(value * k[i], 4)])),
	);
	const plus = cut ? " + log 0" : logU === 0 ? "" : ` + log u = ${logU === -Infinity ? "log 0" : fixed(logU)}`;
	const before = formula(`x = z / T${plus}: ${signed(z)} / ${fixed(state.T, 2)}${cut || logU === -Infinity ? " − ∞" : logU ? ` + ${signed(logU)}` : ""} = `, strong(x === -Infinity ? "−∞" : fixed(x)));
	const weight = { softmax: () => {
		const top = Math.max(...head.x), all = head.x.reduce((total, value) => total + Math.exp(value - top), 0);
		return [formula("e", node("sup", {}, "x − largest"), ` over the sum: ${fixed(Math.exp(x - top))} / ${fixed(all)} = `, strong(fixed(p, 4)))];
	}, entmax: () => {
		const tau = threshold("entmax", head.x);
		return [formula(`[x / 2 − τ]² above 0, with τ = ${fixed(tau)}: ${signed(x / 2)} − ${signed(tau)} = ${x === -Infinity ? "−∞" : fixed(x / 2 - tau)} → `, strong(fixed(p, 4)))];
	}, sparsemax: () => {
		const tau = threshold("sparsemax", head.x);
		return [formula(`[x − τ] above 0, with τ = ${fixed(tau)}: ${x === -Infinity ? "−∞" : fixed(x - tau)} → `, strong(fixed(p, 4)))];
	} }[state.map]();
	const cutter = node("button", { type: "button", class: "play", id: "cut" }, cut ? "Join it again" : "Cut this line");
	cutter.addEventListener("click", () => {
		set({ cuts: cut ? state.cuts.filter((each) => each.join() !== [l, h, chosen, key].join()) : [...state.cuts, [l, h, chosen, key]], key }, true);
		$("cut").focus();
	});
	const zeros = head.p.filter((value) => value === 0).length;
	step(
		"Weight",
		text(`The ${state.map} of all ${chosen + 1} scores; temperature ${fixed(state.T, 2)}. The weights sum to 1${zeros ? `, and ${zeros} of them ${zeros === 1 ? "is" : "are"} exactly 0` : ""}.`),
		before, ...weight,
		terms(`All ${chosen + 1} weights`, ["token", "z", "x", "weight"], () => head.p.map((value, j) => [`${j + 1} ${piece(ids[j])}`, fixed(head.z[j], 4), head.x[j] === -Infinity ? "−∞" : fixed(head.x[j], 4), fixed(value, 5)])),
		cutter, ...(state.cuts.length ? [text(cutEffect())] : []),
	);
	const values = (j) => model.v[l][j * M + from], two = largest(head.p, 2).sort((a, b) => a - b);
	step(
		"Mix",
		text(`“${here}” takes ${fixed(100 * p, 1)} % of the value of “${there}”, and so on.`),
		strip("its value", v), strip("the mix", [...head.mix]),
		formula("entry 1: ", two.map((j) => `${fixed(head.p[j])} · ${signed(values(j))}`).join(" + "), chosen > 1 ? " + … = " : " = ", strong(fixed(head.mix[0], 4))),
		terms(`All ${chosen + 1} terms of entry 1`, ["token", "weight", "value", "product"], () => head.p.map((value, j) => [`${j + 1} ${piece(ids[j])}`, fixed(value, 4), fixed(values(j), 4), fixed(value * values(j), 4)])),
		text("One matrix adds both mixes to the vector, a small network its part."),
		strip("attention adds", [...block.attention]), strip("network adds", [...block.mlp]),
	);
	const target = state.next ?? largest(after, 1)[0], y = [...model.final(chosen)], row = [...weights["lm_head.weight"].slice(target * M, (target + 1) * M)];
	const logits = model.logits(chosen), logit = sum(y, row), top = logits.reduce((a, b) => Math.max(a, b)), all = logits.reduce((total, value) => total + Math.exp(value - top), 0);
	step(
		"Logits",
		text(`The vector after block ${L}, scaled (RMS norm), meets one row per token: here “${piece(target)}”, token ${target}; click another above.`),
		strip("the vector", y), strip(`“${piece(target)}”`, row),
		formula(first(y, row), "= ", strong(`logit ${fixed(logit)}`)),
		formula("e", node("sup", {}, "logit − largest"), ` over the sum: ${fixed(Math.exp(logit - top))} / ${fixed(all)} = `, strong(fixed(after[target], 4))),
		terms(`All ${M} products`, ["entry", "vector", "row", "product"], () => y.map((value, i) => [String(i + 1), fixed(value, 4), fixed(row[i], 4), fixed(value * row[i], 4)])),
	);
}
function drawCuts() {
	for (const cut of state.cuts) {
		const [l, h, i, j] = cut;
		const button = node("button", { type: "button" }, `× cut in ${l + 1}.${h + 1}: “${piece(ids[i])}” may not read “${piece(ids[j])}”`);
		button.addEventListener("click", () => set({ cuts: state.cuts.filter((each) => each !== cut) }, true));
		$("cuts").append(button);
	}
}

// ---- controls

function radios(name, options) {
	for (const [value, label, tone] of options) {
		const input = node("input", { type: "radio", name, value });
		input.addEventListener("change", () => set({ [name]: value }, true));
		$(name).append(node("label", { class: tone }, input, node("span", {}, label)));
	}
}
radios("map", [["softmax", "softmax", "s0"], ["entmax", "entmax 1.5", "s2"], ["sparsemax", "sparsemax", "s1"]]);
radios("prior", [["uniform", "even"], ["recent", "recent first"], ["window", "last 4 only"]]);
for (const example of data.examples) {
	const button = node("button", { type: "button" }, example);
	button.addEventListener("click", () => {
		$("text").value = example;
		typed(example);
	});
	$("examples").append(button, " ");
}
$("text").value = state.text;
$("text").addEventListener("input", (event) => typed(event.target.value));
$("temperature").addEventListener("input", (event) => set({ T: Math.abs(+event.target.value) < 1e-9 ? 1 : 10 ** +event.target.value }, true));
$("reset").addEventListener("click", () => set({ map: "softmax", prior: "uniform", T: 1, cuts: [] }, true));
$("write").addEventListener("click", () => {
	let left = 12;
	const draw = () => { // one of the twelve likeliest tokens, by chance
		if (!ids.length) return;
		const p = probabilities(model.logits(ids.length - 1)), top = largest(p, 12);
		let r = Math.random() * top.reduce((total, id) => total + p[id], 0), at = 0;
		while (at < top.length - 1 && (r -= p[top[at]]) > 0) at++;
		$("text").value = state.text + tokenizer.decode([top[at]]);
		typed($("text").value);
		if (--left) setTimeout(draw, matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 160);
	};
	draw();
});
let wide = 0;
new ResizeObserver(([entry]) => {
	if (Math.abs(entry.contentRect.width - wide) < 1) return;
	wide = entry.contentRect.width;
	show();
}).observe($("stack").parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
addEventListener("hashchange", () => {
	Object.assign(state, fresh(), read());
	$("text").value = state.text;
	update();
});

// ---- the cases that fenchel has computed, compared when the page loads

function compare() {
	const tried = new Model(weights, data.settings), worst = { logits: 0, probabilities: 0, weights: 0 };
	let wrong = 0;
	const apart = (name, a, b) => {
		worst[name] = Math.max(worst[name], Number.isFinite(a) ? Math.abs(a - b) : Infinity);
	};
	for (const { text, ids: expected, how, logits, probabilities: shares, weights: rows } of data.cases) {
		const found = tokenizer.encode(text);
		if (found.join() !== expected.join()) {
			wrong++;
			continue;
		}
		const last = found.length - 1, z = tried.run(found, how).logits(last), p = probabilities(z);
		for (const [id, value] of logits) apart("logits", z[id], value);
		for (const [id, value] of shares) apart("probabilities", p[id], value);
		rows.forEach((heads, l) => heads.forEach((row, h) => row.forEach((value, j) => apart("weights", tried.trace[last].blocks[l].heads[h].p[j], value))));
	}
	const largestGap = Math.max(...Object.values(worst)), good = wrong === 0 && largestGap < data.tolerance;
	$("check").className = good ? "good" : "bad";
	$("check").dataset.worst = JSON.stringify({ ...worst, wrong, cases: data.cases.length });
	$("check").textContent = good
		? `✓ ${data.cases.length} texts, computed by fenchel and compared when this page was opened: the same tokens, and logits, probabilities and weights that differ by ${largestGap.toExponential(0)} at most.`
		: `This page does not compute what fenchel computes: ${wrong} of ${data.cases.length} texts have other tokens, numbers differ by up to ${largestGap.toExponential(1)}. Do not trust it.`;
}

update();
setTimeout(compare, 50); // after the first picture

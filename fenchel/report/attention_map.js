// Attention maps: an overview of all heads, one map enlarged, and the sentence shaded by one row.
//
//   attention(host, {layers, heads, size, tokens, data}), which consists of
//   mapGrid, mapView and sentence(host, unpack(data), choice, changed)
//
// Weights are bytes round(255 sqrt p); choice is {layer, head, query, key}. Uses charts.js.

export function unpack(data) {
	const bytes = Uint8Array.from(atob(data.data), (letter) => letter.charCodeAt(0)), area = data.size ** 2;
	const map = (i) => bytes.subarray(i * area, (i + 1) * area); // layer-major
	const at = ({ layer, head, query }, key) => map(layer * data.heads + head)[query * data.size + key];
	const strongest = (choice) => range(data.size).reduce((best, key) => (at(choice, key) > at(choice, best) ? key : best), 0);
	return { ...data, map, at, strongest, weight: (choice, key) => ((at(choice, key) / 255) ** 2).toFixed(3) };
}

const visible = (token) => token.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
const quoted = (token) => node("bdi", { class: "token" }, visible(token));

// One pixel per weight; the largest of each block if tokens exceed pixels.
function paintMap(canvas, bytes, size, most) {
	const side = Math.min(size, most), greatest = new Uint8Array(side * side), image = new ImageData(side, side);
	const { ramp } = colours(), colour = range(256).map((b) => [...shade(ramp, b / 255), 255]);
	const block = range(size).map((i) => Math.floor((i * side) / size));
	for (let q = 0; q < size; q++)
		for (let k = 0; k < size; k++) {
			const i = block[q] * side + block[k];
			greatest[i] = Math.max(greatest[i], bytes[q * size + k]);
		}
	greatest.forEach((b, i) => image.data.set(colour[b], 4 * i));
	Object.assign(canvas, { width: side, height: side }).getContext("2d").putImageData(image, 0, 0);
}

const radio = (attributes, child) => node("button", { type: "button", role: "radio", ...attributes }, child);

// Radio buttons with a roving tabindex: one stop of the Tab key, arrow keys between them.
function roving(host, label, items, columns, go) {
	host.setAttribute("role", "radiogroup");
	host.setAttribute("aria-label", label);
	items.forEach((item, i) => {
		item.addEventListener("click", () => go(i));
		onArrows(item, (right, down) => {
			const next = clamp(i + right + down * columns, 0, items.length - 1);
			go(next);
			items[next].focus();
		});
	});
	return (chosen) => items.forEach((item, i) => {
		item.tabIndex = i === chosen ? 0 : -1;
		item.setAttribute("aria-checked", i === chosen);
	});
}

export function mapGrid(host, maps, choice, changed) {
	const { layers, heads, size } = maps, title = (word, i) => node("span", {}, heads > 6 ? i + 1 : `${word} ${i + 1}`);
	const name = (i) => `layer ${Math.floor(i / heads) + 1}, head ${(i % heads) + 1}`;
	const cells = range(layers * heads).map((i) => radio({ "aria-label": name(i) }, node("canvas")));
	host.style.gridTemplateColumns = `auto repeat(${heads}, minmax(0, 6.5rem))`;
	host.append(node("span"), ...range(heads).map((i) => title("head", i)));
	for (const i of range(layers)) host.append(title("layer", i), ...cells.slice(i * heads, (i + 1) * heads));
	const check = roving(host, "Layer and head", cells, heads, (i) => {
		Object.assign(choice, { layer: Math.floor(i / heads), head: i % heads });
		choice.key = maps.strongest(choice);
		changed();
	});
	const draw = () => cells.forEach((cell, i) => paintMap(cell.firstChild, maps.map(i), size, 96));
	draw.mark = () => check(choice.layer * heads + choice.head);
	return draw;
}

export function mapView(host, maps, choice, changed) {
	const { size, tokens } = maps, labels = tokens.map(visible), canvas = node("canvas", operable(host)), picture = node("canvas");
	host.append(canvas);
	let gutter = 0, span = 1; // start and extent of the map, as shares of the width
	let painted;

	function move(toKey, toQuery) {
		const key = clamp(toKey, 0, size - 1), query = clamp(toQuery, 0, size - 1);
		if (key === choice.key && query === choice.query) return;
		Object.assign(choice, { key, query });
		changed();
	}
	onMove(canvas, (x, y) => {
		const [key, query] = [x, y].map((share) => Math.floor(((share - gutter) / span) * size));
		if (key >= 0 && query >= 0) move(key, query);
	});
	onArrows(canvas, (right, down) => move(choice.key + right, choice.query + down));

	return () => {
		const width = widthOf(host), pen = context(canvas, width, width), paint = colours();
		const edge = Math.min(Math.max(...labels.map((text) => pen.measureText(text).width)) + 8, width * 0.2);
		const cell = (width - edge - 6) / size, skip = Math.ceil(14 / cell), place = (i) => edge + i * cell;
		[gutter, span] = [edge / width, (cell * size) / width];
		const drawn = [choice.layer, choice.head, paint.ramp].join();
		if (painted !== drawn) paintMap(picture, maps.map(choice.layer * maps.heads + choice.head), size, size);
		painted = drawn;
		pen.imageSmoothingEnabled = false;
		pen.drawImage(picture, edge, edge, cell * size, cell * size);
		function label(i, chosen, upright) {
			if (i !== chosen && (i % skip || Math.abs(i - chosen) * cell < 14)) return;
			pen.save();
			pen.translate(...(upright ? [place(i + 0.5), edge - 4] : [edge - 4, place(i + 0.5)]));
			if (upright) pen.rotate(-Math.PI / 2);
			pen.textAlign = upright ? "left" : "right";
			pen.fillStyle = i === chosen ? paint.accent : paint.muted;
			if (i === chosen) pen.font = `bold ${pen.font}`;
			pen.fillText(labels[i], 0, 0, edge - 6);
			pen.restore();
		}
		for (const i of range(size)) {
			label(i, choice.query, false);
			label(i, choice.key, true);
		}
		pen.strokeStyle = paint.accent;
		pen.globalAlpha = 0.5;
		pen.strokeRect(edge, place(choice.query), cell * size, cell);
		pen.strokeRect(place(choice.key), edge, cell, cell * size);
		pen.globalAlpha = 1;
		pen.lineWidth = 2;
		pen.strokeRect(place(choice.key) - 1, place(choice.query) - 1, cell + 2, cell + 2);
	};
}

// Indices of the tokens of every word, which is not broken over lines. Scripts without spaces break anywhere, and so
// do very long words.
const WORD = 24, SPACELESS = /[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}]/u;
function words(tokens) {
	let length = 0;
	return tokens.reduce((all, token, i) => {
		const before = tokens[i - 1] ?? " ", apart = /\s$/.test(before) || /^\s/.test(token) || SPACELESS.test(before + token);
		length = apart || length + token.length > WORD ? token.length : length + token.length;
		if (length === token.length) all.push([i]);
		else all.at(-1).push(i);
		return all;
	}, []);
}

export function sentence(host, maps, choice, changed) {
	const items = maps.tokens.map((token) => radio({}, token.trim() ? token : visible(token)));
	host.append(...words(maps.tokens).map((word) => node("span", {}, ...word.map((i) => items[i]))));
	const check = roving(host, "Query token", items, 1, (query) => {
		choice.query = query;
		choice.key = maps.strongest(choice);
		changed();
	});
	return () => {
		const { ramp } = colours();
		check(choice.query);
		const line = parseFloat(getComputedStyle(host).lineHeight), top = Math.floor(items[choice.query].offsetTop / line) * line;
		if (top < host.scrollTop) host.scrollTop = top;
		else if (top + line > host.scrollTop + host.clientHeight) host.scrollTop = top + line - host.clientHeight; // lines are shown whole
		items.forEach((item, key) => {
			const [r, g, b] = shade(ramp, maps.at(choice, key) / 255);
			item.style.backgroundColor = css([r, g, b]);
			item.style.color = inkOn([r, g, b]);
		});
	};
}

// The weight that adds most to the divergence of attention from uniform, p log(p n) over n keys, on another token
// than the query and the first, which is often a sink.
function mostTelling({ layers, heads, size, map }) {
	const p = range(256).map((b) => (b / 255) ** 2), own = p.map((x) => (x ? x * Math.log(x) : 0));
	let best = { layer: 0, head: 0, query: size - 1, key: 0 }, most = 0;
	for (const i of range(layers * heads)) {
		const bytes = map(i);
		for (let query = 0; query < size; query++) {
			const keys = Math.log(query + 1);
			for (let key = 1; key < size; key++) {
				const b = bytes[query * size + key], score = own[b] + p[b] * keys;
				if (score <= most || key === query) continue;
				most = score;
				best = { layer: Math.floor(i / heads), head: i % heads, query, key };
			}
		}
	}
	return best;
}

export function attention(host, data) {
	const maps = unpack(data), choice = mostTelling(maps);
	const grid = box("map-grid"), view = node("div", { class: "map-view", "aria-label": "Attention map" }), words = box("sentence");
	const readout = output(), table = node("table"), fold = node("details", {}, node("summary", {}, "This row as a table"));
	fold.append(box("scroll", table));
	host.replaceChildren(box("maps", grid, view, box("map-row", readout, words, fold)));

	const prefix = () => [`Layer ${choice.layer + 1}, head ${choice.head + 1}: `, quoted(data.tokens[choice.query]), " attends to "];
	function tabulate() {
		if (!fold.open) return;
		const row = (kind, ...cells) => node("tr", {}, ...cells.map((cell) => node(kind, {}, cell)));
		table.replaceChildren(node("caption", {}, ...prefix()), node("thead", {}, row("th", "key", "token", "weight")),
			node("tbody", {}, ...data.tokens.map((token, key) => row("td", key, quoted(token), maps.weight(choice, key)))));
	}
	function changed() {
		drawGrid.mark();
		drawView();
		drawWords();
		tabulate();
		readout.replaceChildren(...prefix(), quoted(data.tokens[choice.key]), ` with weight ${maps.weight(choice, choice.key)}`);
	}
	const [drawGrid, drawView, drawWords] = [[mapGrid, grid], [mapView, view], [sentence, words]].map(([make, at]) => make(at, maps, choice, changed));
	view.append(rampBar("0", "1, square-root scale"));
	fold.addEventListener("toggle", tabulate);
	return () => {
		drawGrid();
		changed();
	};
}

// Views of inspections and certificates: a heat map of one of several measures, and intervals.
//
//   heat(host, {rows: [name], columns: [name], titles: [longer name], down, across, start: [column, row], measures: [{name, about, bend, own, values: [[number]]}]})
//   intervals(host, {rows: [{name, centre, lower, upper, texts: [lower, upper]}]})
//
// Columns with titles are tokens: their names stand upright, those of the largest values first where not all
// have room. Cells that are wide enough have their numbers in them.
//
// Colours are linear in the value, or in its logarithm or square root with bend "log" or "root"; with
// "own" every row has its own scale. A scale spans a quarter of its largest value at least, so that
// differences of a few per cent stay pale. Where a value is negative, 0 is the middle of the scale and
// the two signs have colours of their own.

const WIDEST = 120; // pixels of a cell, so that two heads do not fill the page
const NUMBER = 44; // pixels that hold a number of three digits
const UPRIGHT = 90, LINE = 13; // pixels of the longest upright name, and from one to the next

function heat(host, data) {
	const { rows, titles = data.columns, down, across, measures, start } = data, upright = Boolean(data.titles), columns = upright ? data.columns.map(visible) : data.columns;
	const canvas = node("canvas", operable(host)), readout = output(), under = box("under"), about = node("p", { class: "heat-about" });
	const choices = measures.map((measure) => radio({ class: "heat-choice" }, measure.name));
	const bar = box("heat-choices", ...choices);
	host.replaceChildren(...(measures.length > 1 ? [bar] : []), about, canvas, under);
	let shown = 0, at = start, place;
	const check = roving(bar, "Measure", choices, 1, (i) => {
		shown = i;
		draw();
	});
	const ends = (values) => {
		const finite = values.filter((value) => value !== null);
		if (!finite.length) return [0, 0];
		const low = finite.reduce((a, b) => Math.min(a, b)), high = finite.reduce((a, b) => Math.max(a, b));
		if (low < 0) return [Math.min(low, -high), Math.max(high, -low)];
		const margin = Math.max((high / 4 - (high - low)) / 2, 0);
		if (low === high || !margin) return [low < high / 20 && measures[shown].bend !== "log" ? 0 : low, high]; // shares begin at 0
		return [Math.max(low - margin, 0), high + margin];
	};

	function draw() {
		const { values, bend, own, about: text } = measures[shown], paint = colours();
		const width = widthOf(host), probe = context(canvas, 10, 10);
		const left = Math.min(Math.max(...rows.map((name) => probe.measureText(name).width)) + 10, width * 0.3);
		const cell = Math.min((width - left) / columns.length, WIDEST), row = clamp(Math.round(420 / rows.length), 5, 26);
		const foot = upright ? Math.min(Math.max(...columns.map((name) => probe.measureText(name).width)) + 12, UPRIGHT) : 24;
		const height = rows.length * row + foot, pen = context(canvas, width, height), whole = ends(values.flat());
		const positive = bend === "log" && whole[0] > 0, root = bend === "root", curve = root ? Math.sqrt : Number;
		values.forEach((line, i) => {
			const [low, high] = own ? ends(line) : whole, tone = scale(curve(low), curve(high), 0, 1, positive);
			line.forEach((value, j) => {
				const colour = shade(low < 0 ? paint.signs : paint.ramp, value === null || low === high ? 0.5 : tone(curve(value)));
				pen.fillStyle = value === null ? paint.alert : css(colour);
				pen.fillRect(left + j * cell, i * row, cell + (cell > 6 ? -1 : 0.5), row - (row > 10 ? 1 : 0));
				if (value === null || cell < NUMBER || row < LINE) return;
				pen.fillStyle = inkOn(colour);
				pen.textAlign = "center";
				pen.fillText(digits(+value.toPrecision(3)), left + (j + 0.5) * cell, (i + 0.5) * row);
			});
			pen.textAlign = "left";
			pen.fillStyle = i === at[1] ? paint.accent : paint.muted;
			if (!(i % Math.ceil(11 / row))) pen.fillText(rows[i], 0, Math.max((i + 0.5) * row, 6), left - 6);
		});
		const middle = (j) => left + (j + 0.5) * cell, skip = Math.ceil(34 / cell);
		const peaks = columns.map((_, j) => values.reduce((most, line) => Math.max(most, line[j] ?? -Infinity), -Infinity)), taken = [];
		const order = range(columns.length).sort((a, b) => (b === at[0]) - (a === at[0]) || peaks[b] - peaks[a]);
		for (const j of upright ? order : range(columns.length)) {
			if (upright ? taken.some((other) => Math.abs(middle(other) - middle(j)) < LINE) : j % skip) continue;
			taken.push(j);
			pen.save();
			pen.fillStyle = j === at[0] ? paint.accent : paint.muted;
			pen.textAlign = upright ? "right" : "center";
			pen.translate(upright ? middle(j) : Math.min(middle(j), width - pen.measureText(columns[j]).width / 2), rows.length * row + (upright ? 6 : 12));
			if (upright) pen.rotate(-Math.PI / 2);
			pen.fillText(columns[j], 0, 0, upright ? foot - 8 : Math.max(cell * skip - 4, 24));
			pen.restore();
		}
		pen.strokeStyle = paint.accent;
		pen.lineWidth = 2;
		pen.strokeRect(left + at[0] * cell, at[1] * row, Math.max(cell - 1, 2), row - 1);
		place = (x, y) => [Math.floor((x * width - left) / cell), Math.floor((y * height) / row)];
		check(shown);
		about.textContent = text;
		about.hidden = !text;
		readout.textContent = `${[down, rows[at[1]]].join(" ").trim()}, ${across} ${titles[at[0]]}: ${measures[shown].name} ${digits(values[at[1]][at[0]])}`;
		under.replaceChildren(readout, own ? node("p", { class: "ramp" }, `every row on its own scale${positive ? ", logarithmic" : ""}`) : rampBar(digits(whole[0]), digits(whole[1]) + (positive ? ", logarithmic" : root ? ", square-root scale" : ""), whole[0] < 0));
	}
	function move(j, i) {
		at = [clamp(j, 0, columns.length - 1), clamp(i, 0, rows.length - 1)];
		draw();
	}
	onMove(canvas, (x, y) => move(...place(x, y)));
	onArrows(canvas, (right, down_) => move(at[0] + right, at[1] + down_));
	return draw;
}

// A bar per row from lower to upper, both in figures, and a dot at the centre, if there is one; an upper of null is unbounded.
function intervals(host, { rows }) {
	const known = rows.flatMap(({ centre, lower, upper }) => [centre, lower, upper]).filter((value) => value > 0);
	const least = Math.min(...known), most = Math.max(...known), log = most > 30 * least;
	return () => {
		const width = widthOf(host), row = rows.length > 16 ? 22 : 34, height = rows.length * row, left = 110, right = width - 64;
		const X = scale(log ? least : 0, most, left, right, log);
		const label = rows.map(({ name, texts }) => `${name} ${texts.join(" to ")}`).join(", ");
		const chart = frame(width, height + 26, { role: "img", "aria-label": label });
		for (const x of (log ? logTicks : ticks)(log ? least : 0, most, (right - left) / 90))
			chart.append(node("line", { x1: X(x), x2: X(x), y1: 0, y2: height, class: "rule" }), node("text", { x: X(x), y: height + 14, class: "middle" }, compact(x)));
		rows.forEach(({ name, centre, lower, upper, texts }, i) => {
			const y = (i + 0.5) * row, to = upper === null ? right : X(upper);
			const from = log && !(lower > 0) ? left : X(lower), dot = centre === null ? [] : [X(centre)];
			chart.append(
				node("text", { x: 0, y, class: "label" }, name),
				node("text", { x: Math.min(from, ...dot) - 9, y, class: "label end" }, texts[0]),
				node("rect", { x: from, y: y - 5, width: Math.max(to - from, 2), height: 10, class: `interval ${upper === null ? "open" : ""}` }),
				...dot.map((cx) => node("circle", { cx, cy: y, r: 4, class: "dot s1" })),
				node("text", { x: to + 8, y, class: "label ours" }, texts[1]));
		});
		host.replaceChildren(chart);
	};
}

// A heat map of one of several measures.
//
//   heat(host, {rows: [name], columns: [name], titles: [longer name], down, across, measures: [{name, about, bend, own, values: [[number]]}]})
//
// Colours are linear in the value, or in its logarithm or square root with bend "log" or "root"; with
// "own" every row has its own scale. A scale spans a quarter of its largest value at least, as in
// colour_range (attention_over_time.py): differences of a few per cent stay pale.

const WIDEST = 120; // pixels of a cell, so that two heads do not fill the page

function heat(host, data) {
	const { rows, columns, titles = columns, down, across, measures } = data;
	const canvas = node("canvas", operable(host)), readout = output(), under = box("under"), about = node("p", { class: "heat-about" });
	const choices = measures.map((measure) => radio({ class: "heat-choice" }, measure.name));
	const bar = box("heat-choices", ...choices);
	host.replaceChildren(...(measures.length > 1 ? [bar] : []), about, canvas, under);
	let shown = 0, at = [0, 0], place;
	const check = roving(bar, "Measure", choices, 1, (i) => {
		shown = i;
		draw();
	});
	const ends = (values) => {
		const finite = values.filter((value) => value !== null);
		if (!finite.length) return [0, 0];
		const low = finite.reduce((a, b) => Math.min(a, b)), high = finite.reduce((a, b) => Math.max(a, b));
		const margin = Math.max((Math.max(Math.abs(low), Math.abs(high)) / 4 - (high - low)) / 2, 0);
		if (low === high || !margin) return [low, high];
		return [low < 0 ? low - margin : Math.max(low - margin, 0), high + margin];
	};

	function draw() {
		const { values, bend, own, about: text } = measures[shown], paint = colours();
		const width = widthOf(host), probe = context(canvas, 10, 10);
		const left = Math.min(Math.max(...rows.map((name) => probe.measureText(name).width)) + 10, width * 0.3);
		const cell = Math.min((width - left) / columns.length, WIDEST), row = clamp(Math.round(420 / rows.length), 5, 26);
		const height = rows.length * row + 24, pen = context(canvas, width, height), whole = ends(values.flat());
		const positive = bend === "log" && whole[0] > 0, root = bend === "root", curve = root ? Math.sqrt : Number;
		values.forEach((line, i) => {
			const [low, high] = own ? ends(line) : whole, tone = scale(curve(low), curve(high), 0, 1, positive);
			line.forEach((value, j) => {
				pen.fillStyle = value === null ? paint.alert : css(shade(paint.ramp, low === high ? 0.5 : tone(curve(value))));
				pen.fillRect(left + j * cell, i * row, cell + (cell > 6 ? -1 : 0.5), row - (row > 10 ? 1 : 0));
			});
			pen.fillStyle = i === at[1] ? paint.accent : paint.muted;
			if (!(i % Math.ceil(11 / row))) pen.fillText(rows[i], 0, (i + 0.5) * row, left - 6);
		});
		pen.textAlign = "center";
		const skip = Math.ceil(34 / cell);
		columns.forEach((name, j) => {
			pen.fillStyle = j === at[0] ? paint.accent : paint.muted;
			if (!(j % skip)) pen.fillText(name, Math.min(left + (j + 0.5) * cell, width - pen.measureText(name).width / 2), rows.length * row + 12, Math.max(cell * skip - 4, 24));
		});
		pen.strokeStyle = paint.accent;
		pen.lineWidth = 2;
		pen.strokeRect(left + at[0] * cell, at[1] * row, Math.max(cell - 1, 2), row - 1);
		place = (x, y) => [Math.floor((x * width - left) / cell), Math.floor((y * height) / row)];
		check(shown);
		about.textContent = text;
		readout.textContent = `${[down, rows[at[1]]].join(" ").trim()}, ${across} ${titles[at[0]]}: ${measures[shown].name} ${digits(values[at[1]][at[0]])}`;
		under.replaceChildren(readout, own ? node("p", { class: "ramp" }, `every row on its own scale${positive ? ", logarithmic" : ""}`) : rampBar(digits(whole[0]), digits(whole[1]) + (positive ? ", logarithmic" : root ? ", square-root scale" : "")));
	}
	function move(j, i) {
		at = [clamp(j, 0, columns.length - 1), clamp(i, 0, rows.length - 1)];
		draw();
	}
	onMove(canvas, (x, y) => move(...place(x, y)));
	onArrows(canvas, (right, down_) => move(at[0] + right, at[1] + down_));
	return draw;
}

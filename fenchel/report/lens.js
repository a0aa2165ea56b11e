// The view of a lens: a grid of layers and tokens with the most likely next word in every cell, and the law of one.
//
//   laws(host, {tokens: [text], words: {id: text}, lenses: [{name, about, layers, top: [[[id]]], p: [[[number]]], kl: [[number]], rank: [[number]]}], shown: number of the lens, start: [token, layer]})
//
// Cells are shaded by the probability of their word; those with the model's own word are framed. Uses charts.js and
// attention_map.js.

function laws(host, { tokens, words, lenses, shown, start }) {
	const choices = lenses.map((lens) => radio({ class: "heat-choice" }, lens.name)), bar = box("heat-choices", ...choices), about = node("p", { class: "heat-about" });
	const table = node("table", { ...operable(host), class: "lens" }), law = box("lens-law"), scroller = box("scroll", table);
	host.replaceChildren(...(lenses.length > 1 ? [bar] : []), about, scroller, box("under", rampBar("0", "1, square-root scale")), law);
	const cells = lenses[0].layers.map(() => tokens.map(() => node("td")));
	const heads = tokens.map((token) => node("th", { scope: "col" }, visible(token)));
	const rows = lenses[0].layers.map((layer, i) => node("tr", {}, node("th", { scope: "row" }, layer), ...cells[i]));
	table.append(node("thead", {}, node("tr", {}, node("th", { scope: "col" }, "layer"), ...heads)), node("tbody", {}, ...rows));
	let at = start;
	const reveal = () => {
		const cell = cells[at[1]][at[0]], left = cell.offsetLeft, most = scroller.clientWidth - cell.offsetWidth - 8, least = rows[0].firstChild.offsetWidth;
		scroller.scrollLeft = clamp(scroller.scrollLeft, left - most, left - least); // the page itself stays where it is
	};
	const check = roving(bar, "Lens", choices, 1, (i) => {
		shown = i;
		draw();
	});

	function draw() {
		const lens = lenses[shown], { ramp } = colours(), last = lens.layers.length - 1;
		cells.forEach((row, i) => row.forEach((cell, t) => {
			const colour = shade(ramp, Math.sqrt(lens.p[i][t][0]));
			cell.textContent = visible(words[lens.top[i][t][0]]);
			cell.style.backgroundColor = css(colour);
			cell.style.color = inkOn(colour);
			cell.className = `${i < last && lens.rank[i][t] === 1 ? "agrees" : ""} ${i === at[1] && t === at[0] ? "chosen" : ""}`;
		}));
		heads.forEach((head, t) => { head.className = t === at[0] ? "chosen" : ""; });
		check(shown);
		about.textContent = lens.about;
		tell(lens);
		reveal();
	}
	function tell(lens) {
		const [t, i] = at, own = lens.layers.length - 1, answer = lens.top[own][t][0];
		const heading = node("p", { class: "readout" }, i === own ? "The model itself, after " : `Layer ${lens.layers[i]}, after `, quoted(tokens[t]),
			...(i === own ? [""] : [": the model's own word ", quoted(words[answer]), ` has rank ${lens.rank[i][t]} here; KL ${digits(lens.kl[i][t])} nats`]));
		const most = lens.p[i][t][0], lines = lens.top[i][t].map((id, n) => {
			const p = lens.p[i][t][n], fill = node("i");
			fill.style.width = `${(100 * p) / most}%`;
			return node("li", { class: id === answer ? "agrees" : "" }, quoted(words[id]), box("lens-bar", fill), node("span", {}, p.toFixed(3)));
		});
		law.replaceChildren(heading, node("ol", {}, ...lines));
	}
	function move(t, i) {
		at = [clamp(t, 0, tokens.length - 1), clamp(i, 0, cells.length - 1)];
		draw();
	}
	table.addEventListener("click", ({ target }) => {
		const cell = target.closest("td");
		const i = rows.findIndex((row) => row.contains(cell));
		if (cell && i >= 0) move(cells[i].indexOf(cell), i);
	});
	onArrows(table, (right, down) => move(at[0] + right, at[1] + down));
	return draw;
}

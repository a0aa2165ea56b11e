// Who reads whom: a word is chosen, and lines as thick as its weights lead to the words it reads.
// DATA.texts: [{ name, tokens, heads: [{ name, weights }] }], weights[i] of word i over the words it
// may read. With DATA.maps another map and temperature can be tried: the scores behind softmax
// weights are their logarithms, up to a constant that no map sees.
const held = store(DATA.state), page = stage("wide");
const LOW = 0.1, HIGH = 10, MAP_NAMES = { softmax: "softmax", entmax: "entmax 1.5", sparsemax: "sparsemax" };
const textOf = (s) => DATA.texts[s.text], headOf = (s) => textOf(s).heads[s.head];
const reweigh = (s, row) => (DATA.maps ? choose(s.map, row.map(Math.log), 1 / s.T) : row);
const quoted = (token) => `“${token.trim() || "␣"}”`;

const number = (list) => list.map((each, i) => [i, each.name]);
if (DATA.texts.length > 1) radios(page.controls, held, { name: "text", label: "Sentence", options: number(DATA.texts) });
const heads = DATA.texts[0].heads;
if (heads.length > 1) radios(page.controls, held, { name: "head", label: "Head", options: number(heads) });
if (DATA.maps) {
	const options = Object.entries(MAP_NAMES).map(([map, text]) => [map, text, TONES[map]]);
	radios(page.controls, held, { name: "map", label: "Map", options });
	slider(page.controls, held, { name: "T", label: "Temperature", low: LOW, high: HIGH, log: true });
}
const button = page.button(), longest = Math.max(...DATA.texts.map((text) => text.tokens.length));
held.play(button, { name: "word", from: 0, to: longest - 1, seconds: 0.8 * longest, whole: true, words: ["Read on", "Pause"] });

let sentence = null, shown = null;
held.watch((s) => {
	const { tokens } = textOf(s), query = Math.min(s.word, tokens.length - 1);
	if (shown !== s.text) {
		page.picture.replaceChildren();
		const label = "The sentence; choose the word that reads";
		sentence = words(page.picture, { tokens, label, causal: DATA.causal, changed: (word) => held.set({ word }) });
		shown = s.text;
	}
	const rows = headOf(s).weights.map((row) => reweigh(s, row)), row = rows[query];
	sentence.show(query, rows, DATA.maps ? TONES[s.map] : "s0");
	const most = Math.max(...row), top = row.indexOf(most), none = row.filter((p) => p === 0).length;
	const even = row.length > 1 && most - Math.min(...row) < 1e-9;
	const reads = even ? `all ${row.length} words equally` : `${top === query ? "itself" : quoted(tokens[top])} most, with ${Math.round(100 * most)} %`;
	const spread = `Spread as over ${fixed(Math.exp(entropy(row)), 1)} words`;
	const zeros = `${none || "none"} of ${row.length} ${none > 1 ? "have" : "has"} weight exactly 0`;
	page.says.textContent =
		row.length === 1 ? `${quoted(tokens[0])} stands first: it can read only itself.` : `${quoted(tokens[query])} reads ${reads}. ${spread}; ${zeros}.`;
});
share(held);

// The sine and a double cone of the speed limit L with its tip on the graph. DATA.x are the points of
// fenchel.sensitivity.cone; those outside the cone are counted and drawn in red.
const EPS = 2 ** -52;
function isOutside(s, x) { // beyond rounding, as the library has it
	const [y, y0, edge] = [Math.sin(x), Math.sin(s.tip), s.L * Math.abs(x - s.tip)];
	return Math.abs(y - y0) > edge + 4 * EPS * (Math.abs(y) + Math.abs(y0) + edge);
}
const outside = (s) => DATA.x.filter((x) => isOutside(s, x));
const EDGE = 2; // how far beside the tip the handle of the edge stands
const page = stage(), button = page.button();
const picture = scene(page.picture, {
	label: "The sine and a double cone with its tip on it",
	x: [-4.8, 4.8],
	y: [-3.2, 3.2],
	ratio: 0.66,
	ratioNarrow: 0.9,
	axes: { x: "x →", y: "sin x ↑", xTicks: [-4, -3, -2, -1, 0, 1, 2, 3, 4], yTicks: [-3, -2, -1, 0, 1, 2, 3] },
	state: DATA.state,
	handles: {
		limit: {
			label: "Edge of the cone: the speed limit",
			tone: "s1",
			at: (s) => [s.tip + (s.tip > 2 ? -EDGE : EDGE), Math.sin(s.tip) + EDGE * s.L],
			move: (s, [, y]) => ({ L: clamp(Math.round((50 * (y - Math.sin(s.tip))) / EDGE) / 50, 0.5, 1.5) }),
			keys: (s, way, far) => ({ L: clamp(+(s.L + 0.02 * way * far).toFixed(2), 0.5, 1.5) }),
			say: (s) => `speed limit ${fixed(s.L)}, ${outside(s).length} points outside`,
		},
		tip: {
			label: "Tip of the cone",
			tone: "s0",
			at: (s) => [s.tip, Math.sin(s.tip)],
			move: (s, [x]) => ({ tip: clamp(Math.round(10 * x) / 10, -3, 3) }),
			step: [0.1, 0],
			say: (s) => `tip at ${fixed(s.tip, 1)}`,
		},
	},
	draw(pen, s) {
		const y0 = Math.sin(s.tip), ray = (x, side) => [x, y0 + side * s.L * (x - s.tip)];
		for (const end of [-9, 9]) pen.region([[s.tip, y0], ray(s.tip + end, 1), ray(s.tip + end, -1)], { tone: "s1", opacity: 0.12 });
		for (const side of [1, -1]) pen.line(ray(-9, side), ray(9, side), { tone: "s1", width: 1.8 });
		pen.curve(DATA.x.map((x) => [x, Math.sin(x)]), { tone: "s0", width: 2.4 });
		pen.points(outside(s).map((x) => [x, Math.sin(x)]), { tone: "s5", radius: 3, opacity: 0.9 });
		pen.text([4.6, Math.sin(4.6)], "sine", { tone: "s0", bold: true, anchor: "end", dy: 16 });
		const [x, y] = [s.tip + (s.tip > 2 ? -EDGE : EDGE), y0 + EDGE * s.L];
		pen.text([x, y], `slope L = ${fixed(s.L)}`, { tone: "s1", bold: true, dx: s.tip > 2 ? 16 : -16, anchor: s.tip > 2 ? "start" : "end" });
	},
});
slider(page.controls, picture, { name: "L", label: "Speed limit L", low: 0.5, high: 1.5, step: 0.02 });
picture.play(button, { name: "tip", from: -3, to: 3, seconds: 6, words: ["Move the tip", "Pause"] });
const count = page.number("of 600 points of the sine lie outside the cone, in red", "s5");
const steep = page.number("is the slope of the sine at the tip: its cosine", "s0");
picture.watch((s) => {
	count(String(outside(s).length));
	steep(fixed(Math.cos(s.tip)));
});
share(picture);

// The map of x^2 + y^2 with the gradient as an arrow, at a quarter of its length. The slopes in all
// directions, drawn to the same scale, end on the circle that has the arrow as its diameter.
const at = (s) => [s.x, s.y], way = (s) => [Math.cos(s.angle * (Math.PI / 180)), Math.sin(s.angle * (Math.PI / 180))];
const slope = (s) => dot([2 * s.x, 2 * s.y], way(s)), steepest = (s) => 2 * Math.hypot(s.x, s.y);
const along = (s, far) => [s.x + far * way(s)[0], s.y + far * way(s)[1]];
const page = stage("square"), button = page.button();
const picture = scene(page.picture, {
	label: "Map of the bowl: where you stand, the gradient, and the slope in one direction",
	x: [-3.2, 3.2],
	y: [-3.2, 3.2],
	equal: true,
	axes: { x: "east x →", y: "north y ↑", xTicks: [-3, -2, -1, 0, 1, 2, 3], yTicks: [-3, -2, -1, 0, 1, 2, 3] },
	state: DATA.state,
	handles: {
		angle: {
			label: "Direction of the step",
			tone: "s1",
			at: (s) => along(s, 1),
			move: (s, [x, y]) => ({ angle: (Math.round((Math.atan2(y - s.y, x - s.x) * 180) / Math.PI) + 360) % 360 }),
			keys: (s, turn, far) => ({ angle: (s.angle + turn * far + 360) % 360 }),
			say: (s) => `${fixed(s.angle, 0)} degrees, slope ${fixed(slope(s))}`,
		},
		walker: {
			label: "Where you stand",
			tone: "s0",
			at,
			move: (s, [x, y]) => ({ x: clamp(Math.round(20 * x) / 20, -2, 2), y: clamp(Math.round(20 * y) / 20, -2, 2) }),
			step: [0.05, 0.05],
			say: (s) => `east ${fixed(s.x)}, north ${fixed(s.y)}`,
		},
	},
	draw(pen, s) {
		for (const r of [0.5, 1, 1.5, 2, 2.5, 3]) {
			pen.curve(circle([0, 0], r), { tone: "muted", width: r % 1 ? 0.8 : 1.3, opacity: r % 1 ? 0.4 : 0.8 });
			if (r % 1 === 0) pen.text([0, -r], `height ${r * r}`, { tone: "muted", anchor: "middle" });
		}
		const tip = [1.5 * s.x, 1.5 * s.y], turned = Math.abs(slope(s)) / 4;
		pen.curve(circle([1.25 * s.x, 1.25 * s.y], steepest(s) / 8), { tone: "s0", width: 1.2, dash: "3 4" });
		pen.line(at(s), along(s, 1), { tone: "s1", width: 1.4, opacity: 0.7 });
		pen.arrow(at(s), tip, { tone: "s0", width: 3 });
		pen.line(at(s), along(s, slope(s) / 4), { tone: "s1", width: 5 });
		if (turned > 0.05) pen.dot(along(s, slope(s) / 4), { tone: "s1", radius: 4.5 });
		const name = { tone: "s0", bold: true, anchor: "middle", dy: s.y < 0 ? 22 : -22 };
		if (steepest(s) > 0.6) pen.text([clamp(tip[0], -2.4, 2.4), tip[1]], "gradient", name);
	},
});
slider(page.controls, picture, { name: "angle", label: "Direction in degrees", low: 0, high: 360, step: 1, digits: 0 });
picture.play(button, { name: "angle", from: 0, to: 360, seconds: 6, whole: true, words: ["Turn once", "Pause"] });
const mine = page.number("is the slope in your direction, the thick orange part at a quarter of its length", "s1");
const most = page.number("is the steepest: the length of the gradient", "s0");
const parts = page.number("is the gradient (2x, 2y)");
picture.watch((s) => {
	mine(fixed(slope(s)));
	most(fixed(steepest(s)));
	parts(`(${fixed(2 * s.x, 1)}, ${fixed(2 * s.y, 1)})`);
});
share(picture);

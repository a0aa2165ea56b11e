// Two arrows from one point: their lengths, the angle between them, the distance of their tips, and
// the shadow of v on u, whose length times that of u is the inner product.
const uOf = (s) => [s.ux, s.uy], vOf = (s) => [s.length * Math.cos(s.angle), s.length * Math.sin(s.angle)];
const size = (p) => Math.hypot(...p), cosine = (s) => dot(uOf(s), vOf(s)) / (size(uOf(s)) * s.length);
const inside = ([x, y]) => { // between 0.3 and 2 long
	const far = size([x, y]) || 1, wanted = clamp(far, 0.3, 2);
	return [(x / far) * wanted, (y / far) * wanted];
};
const page = stage("square"), button = page.button();
const picture = scene(page.picture, {
	label: "Two arrows, the angle between them and the shadow of one on the other",
	x: [-2.2, 2.2],
	y: [-1.5, 2.1],
	equal: true,
	axes: { xTicks: [-2, -1, 0, 1, 2], yTicks: [-1, 0, 1, 2] },
	state: DATA.state,
	handles: {
		u: {
			label: "Tip of u",
			letter: "u",
			tone: "s0",
			at: uOf,
			move(s, to) {
				const [ux, uy] = inside(to);
				return { ux, uy };
			},
			step: [0.05, 0.05],
			say: (s) => `u is ${fixed(s.ux)}, ${fixed(s.uy)}`,
		},
		v: {
			label: "Tip of v",
			letter: "v",
			tone: "s1",
			at: vOf,
			move(s, to) {
				const [x, y] = inside(to);
				return { length: size([x, y]), angle: Math.atan2(y, x) };
			},
			step: [0.05, 0.05],
			say: (s) => `v is ${vOf(s).map((a) => fixed(a)).join(", ")}`,
		},
	},
	draw(pen, s) {
		const u = uOf(s), v = vOf(s), start = Math.atan2(u[1], u[0]);
		let turn = s.angle - start;
		turn -= 2 * Math.PI * Math.round(turn / (2 * Math.PI));
		const long = dot(u, v) / size(u), shadow = [(u[0] / size(u)) * long, (u[1] / size(u)) * long];
		const wedge = arc([0, 0], 0.34, start, start + turn, 41), middle = start + turn / 2;
		pen.line([0, 0], [(u[0] / size(u)) * 3, (u[1] / size(u)) * 3], { tone: "muted", width: 0.8, opacity: 0.5 });
		pen.line([0, 0], [(-u[0] / size(u)) * 3, (-u[1] / size(u)) * 3], { tone: "muted", width: 0.8, opacity: 0.5 });
		pen.region([[0, 0], ...wedge], { tone: "s3", opacity: 0.18 });
		pen.curve(wedge, { tone: "s3", width: 2 });
		pen.line(u, v, { tone: "muted", width: 1.6, dash: "6 5" });
		pen.line(v, shadow, { tone: "s1", width: 1.2, dash: "2 4" });
		pen.arrow([0, 0], u, { tone: "s0", width: 3 });
		pen.arrow([0, 0], v, { tone: "s1", width: 3 });
		pen.line([0, 0], shadow, { tone: "s5", width: 6, opacity: 0.75 });
		pen.text([0.58 * Math.cos(middle), 0.58 * Math.sin(middle)], `${fixed((Math.abs(turn) * 180) / Math.PI, 0)}°`, { tone: "s3", anchor: "middle", bold: true });
		if (Math.abs(long) > 0.25) pen.text([0.6 * shadow[0], 0.6 * shadow[1]], "shadow", { tone: "s5", anchor: "middle", dy: turn > 0 === u[0] > 0 ? 18 : -18 });
	},
});
slider(page.controls, picture, { name: "length", label: "Length of v", low: 0.3, high: 2 });
picture.play(button, { name: "length", from: 0.3, to: 2, seconds: 5, words: ["Stretch v", "Pause"] });
const angle = page.number("cosine of the angle: it stays when v is stretched", "s3");
const product = page.number("inner product: the shadow of v times the length of u", "s5");
const apart = page.number("distance of the tips, the dashed line");
picture.watch((s) => {
	const u = uOf(s), v = vOf(s);
	angle(fixed(cosine(s), 3));
	product(fixed(dot(u, v), 3));
	apart(fixed(size([u[0] - v[0], u[1] - v[1]]), 3));
});
share(picture);

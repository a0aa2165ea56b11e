// The triangle of all distributions over three alternatives: a corner has everything, a side gives
// one of them nothing. The dog (softmax) is tied to the post (the prior u) by KL(p || u), whose rings
// are drawn; the scores DATA.scores pull it along the arrow. No place on its ring has a better average.
const NAMES = ["A", "B", "C"], [LOW, HIGH] = [0.05, 5], HEIGHT = Math.sqrt(1 / 3);
const CORNERS = [[-0.5, -HEIGHT / 2], [0.5, -HEIGHT / 2], [0, HEIGHT]]; // side 1, about 0
const plane = (p) => [dot(p, CORNERS.map((c) => c[0])), dot(p, CORNERS.map((c) => c[1]))];
const shares = ([x, y]) => CORNERS.map((c) => 1 / 3 + 2 * (c[0] * x + c[1] * y)); // the inverse of plane
const priorOf = (s) => NAMES.map((name) => s[name]), dog = (s, beta = s.beta) => choose("softmax", DATA.scores, beta, priorOf(s));
const stretch = (p, u) => p.reduce((sum, q, i) => (q > 1e-12 ? sum + q * Math.log(q / u[i]) : sum), 0);
const pull = plane(DATA.scores.map((z) => z - DATA.scores.reduce((a, b) => a + b) / 3)), strength = Math.hypot(...pull);
function post(at) { // at most one share is 0, and then exactly
	const near = shares(at).map((v) => (v < 0.02 ? 0 : v)), lowest = near.indexOf(Math.min(...near));
	const kept = near.map((v, i) => (i === lowest ? v : Math.max(v, 0.04))), sum = kept.reduce((a, b) => a + b);
	return Object.fromEntries(NAMES.map((name, i) => [name, kept[i] / sum]));
}
const page = stage("square"), button = page.button();
const picture = scene(page.picture, {
	label: "A dog on a leash in the triangle of all distributions",
	x: [-0.62, 0.62],
	y: [-0.4, 0.68],
	equal: true,
	open: true,
	margin: { left: 4, right: 4, top: 4, bottom: 4 },
	state: DATA.state,
	handles: {
		dog: {
			label: "The dog on its path: β",
			tone: "s0",
			at: (s) => plane(dog(s)),
			move(s, [x, y]) {
				const all = range(241).map((i) => LOW * (HIGH / LOW) ** (i / 240));
				const far = all.map((beta) => plane(dog(s, beta))).map((p) => (p[0] - x) ** 2 + (p[1] - y) ** 2);
				return { beta: all[far.indexOf(Math.min(...far))] };
			},
			keys: (s, way, far) => ({ beta: clamp(s.beta * 1.05 ** (way * far), LOW, HIGH) }),
			say: (s) => `beta ${fixed(s.beta)}, leash ${fixed(stretch(dog(s), priorOf(s)), 3)} nats`,
		},
		post: {
			label: "The post: the prior u",
			letter: "u",
			tone: "s3",
			step: [0.01, 0.01],
			at: (s) => plane(priorOf(s)),
			move: (s, at) => post(at),
			say: (s) => `prior ${priorOf(s).map((v) => fixed(v)).join(", ")}`,
		},
	},
	draw(pen, s) {
		const u = priorOf(s), p = dog(s), at = plane(p), from = plane(u), ring = stretch(p, u);
		const height = (x, y) => stretch(shares([x, y]).map((v) => Math.max(v, 0)), u), key = u.join();
		pen.region(CORNERS, { tone: "muted", opacity: 0.08 });
		if (Math.min(...u) > 0) {
			pen.contours(height, [0.02, 0.08, 0.18, 0.32, 0.5, 0.72, 0.98], { opacity: 0.3, clip: CORNERS, key });
			if (ring > 0.002) pen.contours(height, [ring], { tone: "s0", width: 2.2, clip: CORNERS, key });
		}
		pen.curve([...CORNERS, CORNERS[0]], { tone: "muted", width: 1.5 });
		const across = [-pull[1] / strength, pull[0] / strength]; // the average score is the same along it
		const equal = [-1, 1].map((side) => [at[0] + 0.3 * side * across[0], at[1] + 0.3 * side * across[1]]);
		pen.line(...equal, { tone: "s1", width: 1.4, dash: "5 4" });
		pen.curve(range(121).map((i) => plane(dog(s, LOW * (3 * HIGH / LOW) ** (i / 120)))), { tone: "s0", width: 1.4, opacity: 0.5 });
		pen.line(from, at, { tone: "s3", width: 2.4 });
		pen.arrow(at, [at[0] + (0.17 * pull[0]) / strength, at[1] + (0.17 * pull[1]) / strength], { tone: "s1", width: 2.6 });
		const tip = [at[0] + (0.2 * pull[0]) / strength, at[1] + (0.2 * pull[1]) / strength];
		pen.text(tip, "smell", { tone: "s1", bold: true, anchor: "start", dx: 4 });
		for (const [i, dx, dy] of [[0, -4, 16], [1, 4, 16], [2, 0, -16]])
			pen.text(CORNERS[i], `${NAMES[i]}: score ${DATA.scores[i]}`, { dx, dy, anchor: "middle", bold: true });
	},
});
slider(page.controls, picture, { name: "beta", label: "Soft leash: β", low: LOW, high: HIGH, log: true });
picture.play(button, { name: "beta", from: LOW, to: HIGH, seconds: 6, log: true, words: ["Loosen the leash", "Pause"] });
const mean = page.number("average score: the same along the dashed line", "s1");
const leash = page.number("nats of leash, KL(p‖u): the same along the blue ring", "s0");
page.side.append(node("h2", {}, "The dog: weights p"));
const weights = bars(page.side, NAMES.map((name) => ({ name, tone: "s0" })));
page.side.append(node("h2", {}, "The post: prior u"));
const given = bars(page.side, NAMES.map((name) => ({ name, tone: "s3" })));
picture.watch((s) => {
	const p = dog(s), u = priorOf(s);
	mean(fixed(dot(p, DATA.scores), 3));
	leash(fixed(stretch(p, u), 3));
	weights(p);
	given(u);
});
share(picture);

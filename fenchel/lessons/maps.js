// The choice maps of fenchel.choice in a page: with x = beta z + log u,
//
//   weights = argmax <p, x> - Omega(p) over the simplex.
//
//   choose("softmax" | "entmax" | "sparsemax", z, beta = 1, prior = null)   entmax has alpha = 1.5
//
// A prior of 0 forbids; where everything is forbidden, every weight is 0.
// tests/lessons/test_scene.py compares all three with fenchel.choice.

function softmax(x) {
	const top = Math.max(...x);
	if (top === -Infinity) return x.map(() => 0);
	const powers = x.map((v) => Math.exp(v - top)), sum = powers.reduce((a, b) => a + b, 0);
	return powers.map((v) => v / sum);
}

// p = [x - tau]_+ ; over the k largest tau = (sum - 1) / k.
function sparsemax(x) {
	const top = Math.max(...x), sorted = x.filter((v) => v > -Infinity).map((v) => v - top).sort((a, b) => b - a);
	let sum = 0, tau = 0;
	for (let k = 0; k < sorted.length; k++) {
		sum += sorted[k];
		const next = (sum - 1) / (k + 1);
		if (sorted[k] <= next) break;
		tau = next;
	}
	return x.map((v) => (v > -Infinity ? Math.max(0, v - top - tau) : 0));
}

// p = [x / 2 - tau]_+^2 ; over the k largest, with mean m and summed squares s about it,
// tau = m - sqrt((1 - s) / k).
function entmax15(x) {
	const top = Math.max(...x), half = x.map((v) => (v > -Infinity ? (v - top) / 2 : -Infinity));
	const sorted = half.filter((v) => v > -Infinity).sort((a, b) => b - a);
	let mean = 0, squares = 0, tau = 0;
	for (let k = 0; k < sorted.length; k++) {
		const step = sorted[k] - mean;
		mean += step / (k + 1);
		squares += step * (sorted[k] - mean);
		if (squares > 1) break;
		const next = mean - Math.sqrt((1 - squares) / (k + 1));
		if (sorted[k] <= next) break;
		tau = next;
	}
	return half.map((v) => (v > tau ? (v - tau) ** 2 : 0));
}

const MAPS = { softmax, entmax: entmax15, sparsemax };
const TONES = { softmax: "s0", entmax: "s2", sparsemax: "s1" }; // one colour per map in the whole course
const entropy = (p) => p.reduce((sum, q) => (q > 0 ? sum - q * Math.log(q) : sum), 0);
const dot = (p, z) => p.reduce((sum, q, i) => sum + q * z[i], 0);

function choose(map, z, beta = 1, prior = null) {
	return MAPS[map](z.map((v, i) => beta * v + (prior ? Math.log(prior[i]) : 0)));
}

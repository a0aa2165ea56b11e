// The model of the lessons in a page: byte-level BPE, float16 weights, the forward pass with a KV cache.
//
//   tokenizer = new Tokenizer({ vocab, merges, control })   encode(text) -> ids, decode(ids) -> text
//   weights = unpack(bytes, shapes)                   float16, little-endian, one tensor after another
//   model = new Model(weights, settings)              width M, heads H, layers L, vocabulary V
//   model.run(ids, { map, beta, prior, cuts })        computes what has changed; -> this
//   model.logits(t, layer)                            of position t after `layer` blocks
//
// A pre-norm decoder as fenchel.model has it: RMS norm, rotary positions, SwiGLU, causal attention
//
//   z_j = <q, k_j> / sqrt(D)     x_j = beta z_j + log u_j     p = choice map (x)     mix = sum_j p_j v_j
//
// with D = M / H. A prior u is a function of the distance; a cut makes u_j = 0 for one query, key and
// head, so the others share its weight. Sums are in double precision, what is kept in float32: logits
// agree with fenchel's in float64 to about 1e-5 (tests/lessons/test_model_page.py).

// ---- choice maps: argmax over the simplex of <p, x> - Omega(p); -Infinity forbids, no key gives zeros

function softmax(x) {
	const top = Math.max(...x);
	if (top === -Infinity) return x.map(() => 0);
	const e = x.map((v) => Math.exp(v - top)), sum = e.reduce((a, b) => a + b, 0);
	return e.map((v) => v / sum);
}

function threshold(map, x) { // tau: p = [x - tau]_+ of sparsemax, p = [x / 2 - tau]_+^2 of entmax with alpha = 1.5
	const half = map === "entmax" ? 0.5 : 1, s = x.filter((v) => v > -Infinity).map((v) => v * half).sort((a, b) => b - a);
	let mean = 0, spread = 0, tau = Infinity;
	for (let k = 1; k <= s.length; k++) {
		const step = s[k - 1] - mean;
		mean += step / k;
		spread += step * (s[k - 1] - mean);
		if (map === "entmax" && spread > 1) break;
		const t = map === "entmax" ? mean - Math.sqrt((1 - spread) / k) : mean - 1 / k;
		if (s[k - 1] <= t) break;
		tau = t;
	}
	return tau;
}

const MAPS = {
	softmax,
	entmax: (x) => {
		const tau = threshold("entmax", x);
		return x.map((v) => Math.max(0, v / 2 - tau) ** 2);
	},
	sparsemax: (x) => {
		const tau = threshold("sparsemax", x);
		return x.map((v) => Math.max(0, v - tau));
	},
};

// ---- priors: log u of a key that stands `back` tokens before the query; a constant changes nothing

const PRIORS = {
	uniform: () => 0,
	recent: (back) => -back * Math.LN2,
	window: (back) => (back < 4 ? 0 : -Infinity),
};

class Model {
	constructor(weights, { width, heads, layers, vocabulary, context, epsilon, base }) {
		Object.assign(this, { w: weights, M: width, H: heads, L: layers, V: vocabulary, context, epsilon });
		this.D = width / heads;
		this.F = weights["blocks.0.mlp.up.weight"].length / width;
		this.ids = [];
		this.how = "";
		const half = this.D / 2;
		this.cos = new Float64Array(context * half);
		this.sin = new Float64Array(context * half);
		for (let t = 0; t < context; t++) for (let i = 0; i < half; i++) {
			const angle = t * base ** (-2 * i / this.D);
			this.cos[t * half + i] = Math.cos(angle);
			this.sin[t * half + i] = Math.sin(angle);
		}
		const room = () => Array.from({ length: layers }, () => new Float32Array(context * width));
		this.k = room();
		this.v = room();
		this.trace = []; // of each position: { embedding, blocks: [{ q, heads: [{ z, x, p, mix }], attention, mlp, stream }] }
	}

	// What stays the same from the left on is not computed again.
	run(ids, { map = "softmax", beta = 1, prior = "uniform", cuts = [] } = {}) {
		const how = JSON.stringify([map, beta, prior, cuts]), kept = how === this.how ? this.ids : [];
		let same = 0;
		ids = ids.slice(-this.context);
		while (same < ids.length && ids[same] === kept[same]) same++;
		Object.assign(this, { how, map, beta, ids, computed: ids.length - same });
		const closed = new Set(cuts.map((cut) => cut.join()));
		for (let t = same; t < ids.length; t++) this.step(ids[t], t, PRIORS[prior], closed);
		this.trace.length = ids.length;
		return this;
	}

	step(id, t, prior, closed) {
		const { M, H, D, F, w } = this, here = { embedding: w["embed.weight"].slice(id * M, (id + 1) * M), blocks: [] };
		let stream = here.embedding;
		for (let l = 0; l < this.L; l++) {
			const of = (name) => w[`blocks.${l}.${name}.weight`], K = this.k[l], V = this.v[l];
			const qkv = product(of("attention.qkv"), this.norm(stream, of("attention_norm")), 3 * M);
			this.rotate(qkv, 0, t);
			this.rotate(qkv, M, t);
			K.set(qkv.subarray(M, 2 * M), t * M);
			V.set(qkv.subarray(2 * M), t * M);
			const q = qkv.slice(0, M), mixed = new Float32Array(M), heads = [];
			for (let h = 0; h < H; h++) {
				const z = [], x = [];
				for (let j = 0; j <= t; j++) {
					let sum = 0;
					for (let i = h * D; i < (h + 1) * D; i++) sum += q[i] * K[j * M + i];
					z.push(sum / Math.sqrt(D));
					x.push(closed.has(`${l},${h},${t},${j}`) ? -Infinity : this.beta * z[j] + prior(t - j));
				}
				const p = MAPS[this.map](x);
				for (let i = h * D; i < (h + 1) * D; i++) {
					let sum = 0;
					for (let j = 0; j <= t; j++) sum += p[j] * V[j * M + i];
					mixed[i] = sum;
				}
				heads.push({ z, x, p, mix: mixed.subarray(h * D, (h + 1) * D) });
			}
			const attention = product(of("attention.out"), mixed, M), middle = stream.map((v, i) => v + attention[i]);
			const y = this.norm(middle, of("mlp_norm")), gate = product(of("mlp.gate"), y, F), up = product(of("mlp.up"), y, F);
			for (let i = 0; i < F; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]));
			const mlp = product(of("mlp.down"), up, M);
			stream = middle.map((v, i) => v + mlp[i]);
			here.blocks.push({ q, heads, attention, mlp, stream });
		}
		this.trace[t] = here;
	}

	stream(t, layer) {
		return layer === 0 ? this.trace[t].embedding : this.trace[t].blocks[layer - 1].stream;
	}

	// The stream after `layer` blocks as the LM head sees it; before the last block this is the logit lens.
	final(t, layer = this.L) {
		return this.norm(this.stream(t, layer), this.w["norm.weight"]);
	}

	logits(t, layer = this.L) {
		return product(this.w["lm_head.weight"], this.final(t, layer), this.V);
	}

	norm(x, gain) {
		let square = 0;
		for (const v of x) square += v * v;
		const r = 1 / Math.sqrt(square / x.length + this.epsilon);
		return x.map((v, i) => v * r * gain[i]);
	}

	// Entry i of a head and entry i + D / 2 are one point of a plane, turned by t times the angle of i.
	rotate(x, from, t) {
		const half = this.D / 2;
		for (let h = 0; h < this.H; h++) for (let i = 0; i < half; i++) {
			const a = from + h * this.D + i, b = a + half, c = this.cos[t * half + i], s = this.sin[t * half + i];
			[x[a], x[b]] = [x[a] * c - x[b] * s, x[b] * c + x[a] * s];
		}
	}
}

function product(W, x, rows) { // W (rows, columns) times x
	const columns = x.length, out = new Float32Array(rows);
	for (let r = 0, at = 0; r < rows; r++, at += columns) {
		let a = 0, b = 0, c = 0, d = 0; // four sums: they do not wait for each other
		for (let i = 0; i < columns; i += 4) {
			a += W[at + i] * x[i];
			b += W[at + i + 1] * x[i + 1];
			c += W[at + i + 2] * x[i + 2];
			d += W[at + i + 3] * x[i + 3];
		}
		out[r] = a + b + c + d;
	}
	return out;
}

function probabilities(logits) {
	let top = -Infinity, sum = 0;
	for (const v of logits) top = Math.max(top, v);
	const p = Float64Array.from(logits, (v) => Math.exp(v - top));
	for (const v of p) sum += v;
	return p.map((v) => v / sum);
}

function largest(values, count) { // indices, the largest first
	const found = [];
	for (let i = 0; i < values.length; i++) {
		if (found.length === count && values[i] <= values[found[count - 1]]) continue;
		found.push(i);
		found.sort((a, b) => values[b] - values[a]);
		found.length = Math.min(found.length, count);
	}
	return found;
}

// ---- text to tokens: the cuts and the signs for bytes are GPT-2's

class Tokenizer {
	constructor({ vocab, merges, control }) { // control: ids of the tokens that are no text, such as the end of a document
		this.vocab = vocab;
		this.control = new Map(control.map((id) => [vocab[id], id]));
		this.ids = new Map(vocab.map((piece, id) => [piece, id]));
		this.rank = new Map(merges.map((pair, rank) => [pair, rank]));
		this.known = new Map();
		let next = 256;
		const visible = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
		this.signs = Array.from({ length: 256 }, (_, b) => String.fromCharCode(visible(b) ? b : next++));
		this.bytes = new Map(this.signs.map((sign, b) => [sign, b]));
	}

	encode(text) { // names of control tokens are text too
		const cuts = text.match(/'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu) ?? [];
		return cuts.flatMap((cut) => this.word(cut));
	}

	word(cut) {
		if (this.known.has(cut)) return this.known.get(cut);
		const parts = Array.from(new TextEncoder().encode(cut), (b) => this.signs[b]);
		for (;;) {
			let best = Infinity, at = -1;
			for (let i = 0; i + 1 < parts.length; i++) {
				const rank = this.rank.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
				if (rank < best) [best, at] = [rank, i];
			}
			if (at < 0) break;
			parts.splice(at, 2, parts[at] + parts[at + 1]);
		}
		const ids = parts.map((part) => this.ids.get(part));
		this.known.set(cut, ids);
		return ids;
	}

	decode(ids) {
		const bytes = ids.flatMap((id) => (this.control.has(this.vocab[id]) ? [] : Array.from(this.vocab[id], (sign) => this.bytes.get(sign))));
		return new TextDecoder().decode(new Uint8Array(bytes));
	}
}

// ---- weights

function half(bits) {
	const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
	if (exponent === 31) return fraction ? NaN : sign * Infinity;
	return exponent ? sign * (1 + fraction / 1024) * 2 ** (exponent - 15) : sign * fraction * 2 ** -24;
}

function unpack(bytes, shapes) { // shapes: [[name, [rows, columns]]]
	const table = Float32Array.from({ length: 65536 }, (_, bits) => half(bits)), weights = {};
	let at = 0;
	for (const [name, shape] of shapes) {
		const values = new Float32Array(shape.reduce((a, b) => a * b, 1));
		for (let i = 0; i < values.length; i++, at += 2) values[i] = table[bytes[at] | (bytes[at + 1] << 8)];
		weights[name] = values;
	}
	return weights;
}

function fromBase64(text) {
	const code = atob(text), bytes = new Uint8Array(code.length);
	for (let i = 0; i < code.length; i++) bytes[i] = code.charCodeAt(i);
	return bytes;
}

"use strict";

/* Numbers on axes: where ticks stand and how they are written. */

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function power(exponent) {
  const digits = String(Math.abs(exponent)).split("").map((digit) => SUPERSCRIPTS[Number(digit)]);
  return "10" + (exponent < 0 ? "⁻" : "") + digits.join("");
}

/** A number for people: four digits, thousands apart, powers of ten where it is very large or small. */
function shown(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    const factor = Number(mantissa);
    const sign = factor < 0 ? "−" : "";
    const front = Math.abs(factor) === 1 ? "" : String(Math.abs(factor)) + "·";
    return sign + front + power(Number(exponent));
  }
  const rounded = Number(value.toPrecision(size >= 1000 ? 6 : digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
}

/** About `count` round numbers, and at least two: a single one does not show the scale. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const sizes = [10, 5, 2, 1].map((factor) => factor * unit);
  let ticks = [];
  for (const step of sizes.slice(sizes.findLastIndex((size) => size >= rough * 0.999))) {
    ticks = multiples(low, high, step);
    if (ticks.length > 1) break;
  }
  return ticks;
}

function multiples(low, high, step) {
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k += 1) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first) / count));
  for (const factors of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 5, 7]]) {
    const ticks = [];
    for (let exponent = first; exponent <= last; exponent += stride) {
      for (const factor of stride > 1 ? [1] : factors) {
        const tick = factor * 10 ** exponent;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(Number(tick.toPrecision(6)));
      }
    }
    if (ticks.length >= Math.min(3, count)) return ticks;
  }
  return linearTicks(low, high, count);
}

/** Mean over about `width` neighbours, fewer at the ends. */
function runningMean(values, width) {
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const before = Math.min(Math.floor(width / 2), i);
    const behind = Math.min(before, values.length - 1 - i);
    return (sums[i + behind + 1] - sums[i - before]) / (before + behind + 1);
  });
}

"use strict";
// Numbers written for people: at most four significant digits, a unit, and "–" for a missing number.

const MISSING = "–";

function shortText(value) {
  const size = Math.abs(value);
  // Each bound is where three digits of the unit below would round to 1000 of it.
  if (size >= 999.5e6) return trim(value / 1e9) + "G";
  if (size >= 999.5e3) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (Number.isInteger(value)) return minus(value);
  if (size >= 100) return minus(value.toFixed(0));
  if (size >= 0.001) return minus(String(Number(value.toPrecision(3))));
  return value === 0 ? "0" : minus(Number(value.toPrecision(3)).toExponential());
}

function trim(value) {
  return minus(Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
}

/** A true minus sign, as wide as a digit. */
function minus(text) {
  return String(text).replace(/^-/, "−").replace(/e-/, "e−").replace("e+", "e");
}

function percentText(value) {
  return (100 * value).toFixed(1) + " %";
}

function bytesText(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return (unit ? value.toFixed(1) : value.toFixed(0)) + " " + units[unit];
}

function secondsText(value) {
  if (value < 0.0995) return Math.round(value * 1000) + " ms";
  if (value < 59.95) return value.toFixed(1) + " s";
  const seconds = Math.round(value), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  const two = (n) => String(n).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${two(seconds % 60)} s`;
  if (hours < 48) return `${hours} h ${two(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${two(hours % 24)} h`;
}

/** A metric's value with its unit; `tight` leaves the longer units out, for axes. */
function numberText(value, unit, tight = false) {
  if (value === null || value === undefined) return MISSING;
  switch (unit) {
    case "share": return tight ? Number((100 * value).toPrecision(4)) + " %" : percentText(value);
    case "bytes": return bytesText(value);
    case "seconds": return secondsText(value);
    case "rate": return value === 0 ? "0" : minus(Number(value.toPrecision(3)).toExponential());
    case "tokens/s": return shortText(value) + (tight ? "" : " tokens/s");
    case "tokens": return shortText(value) + (tight ? "" : " tokens");
    case "nats": return shortText(value) + (tight ? "" : " nats");
    default: return shortText(value);
  }
}

function countText(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

// Numbers for people.

export const percent = (p) => {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  if (value === 0) return "0 %";
  if (value >= 99.995 && value < 100) return "> 99.99 %";
  return value >= 0.01 ? `${value.toFixed(2)} %` : `${value.toExponential(1)} %`;
};
export const number = (x, digits = 3) => (x === null || x === undefined ? "–" : x.toFixed(digits));
const grouped = new Intl.NumberFormat("en");
export const count = (n) => grouped.format(n);
export const seconds = (s) =>
  s >= 1 ? `${s.toFixed(2)} s` : s >= 0.001 ? `${(1000 * s).toFixed(1)} ms` : `${(1e6 * s).toFixed(0)} µs`;
export const bytes = (n) =>
  n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${n} B`;

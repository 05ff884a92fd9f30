// The icons: paths on a field of 24 by 24, drawn with the colour of the text.

import { html } from "../lens/vendor/lit-html.js";

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16", plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6 6 18", check: "M5 12.5l4.5 4.5L19 7.5",
  send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z", attach: "M19 11.5l-7.2 7.2a4.5 4.5 0 0 1-6.4-6.4L13 4.8a3 3 0 0 1 4.2 4.2l-7.4 7.4a1.5 1.5 0 0 1-2.1-2.1L14.5 7.5",
  copy: "M9 9h10v11H9zM5 15V4h10", edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", again: "M20 11a8 8 0 1 0-2.3 6M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", more: "M5.5 12h.01M12 12h.01M18.5 12h.01", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6",
  down: "M6 9l6 6 6-6", lens: "M10.5 17a6.5 6.5 0 1 0 0-13 6.5 6.5 0 0 0 0 13M15.5 15.5 20 20", info: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18M12 11v5M12 8h.01",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4", moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5 7.5 7.5 0 1 0 19 14.5", sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6 7 7M17 17l1.4 1.4M18.4 5.6 17 7M7 17l-1.4 1.4",
  auto: "M12 20a8 8 0 1 0 0-16 8 8 0 0 0 0 16M12 4v16M14 7h3M14 12h5M14 17h3", keys: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8", file: "M6 3h8l4 4v14H6zM14 3v4h4",
  out: "M12 15V4M8 8l4-4 4 4M5 15v5h14v-5", into: "M12 4v11M8 11l4 4 4-4M5 15v5h14v-5", key: "M8 19a4 4 0 1 0 0-8 4 4 0 0 0 0 8M11 12l8-8M16 7l3 3", tool: "M14 6a4 4 0 0 0 5 5l-9 9-4-4 9-9M14 6l3-3",
};

export const icon = (name) =>
  html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

// One panel beside the button that opened it: a menu, the models, the details of an answer. The
// browser closes it on Escape and on a click elsewhere (the popover API).

import { html } from "../lens/vendor/lit-html.js";
import { changed, state } from "./store.js";

const GAP = 6; // pixels between button and panel

export function openPanel(event, label, view) {
  const panel = document.getElementById("panel");
  const wasOpen = panel.matches(":popover-open") && state.panel?.label === label;
  state.panel = wasOpen ? null : { label, view, from: event.currentTarget };
  if (wasOpen) panel.hidePopover();
  else if (!panel.matches(":popover-open")) panel.showPopover();
  changed();
  requestAnimationFrame(() => requestAnimationFrame(place));
}

export function closePanel() {
  document.getElementById("panel").hidePopover();
}

// Below the button, or above it where there is no room; inside the window in any case.
function place() {
  const panel = document.getElementById("panel");
  if (!state.panel) return;
  const at = state.panel.from.getBoundingClientRect(), { offsetWidth: width, offsetHeight: height } = panel;
  const below = at.bottom + GAP + height <= innerHeight;
  panel.style.top = `${Math.max(GAP, below ? at.bottom + GAP : at.top - GAP - height)}px`;
  panel.style.left = `${Math.max(GAP, Math.min(at.left, innerWidth - width - GAP))}px`;
  panel.querySelector("button, input, [tabindex]")?.focus();
}

function toggled(event) {
  if (event.newState === "open") return;
  const { from } = state.panel ?? {};
  state.panel = null;
  if (document.activeElement === document.body) from?.focus();
  changed();
}

export const panel = () => html`<div id="panel" popover tabindex="0" role="dialog" aria-label=${state.panel?.label ?? "panel"} @toggle=${toggled}>${state.panel?.view() ?? ""}</div>`;

"""How the page "New run" is laid out: two columns that become one on a phone, and help that appears at its field."""

from __future__ import annotations

STYLE = """<style>
/* Start and the plan stay in sight while the form, the preview and the command scroll. Gradio's own `hidden` would make
   the container the frame that a sticky column keeps to. */
.gradio-container { overflow: clip !important; }
#new-run { display: flex; flex-direction: column; flex-wrap: nowrap; gap: 16px; }
#new-run > * { width: 100%; min-width: 0 !important; }
@media (max-width: 899px) {
  #beside { display: contents; }
  #go { position: sticky; bottom: 0; top: 0; z-index: 40; padding: 8px 0; background: var(--body-background-fill); }
}
@media (min-width: 900px) {
  #new-run { display: grid; grid-template: "form beside" auto "below beside" 1fr / minmax(0, 1fr) minmax(0, 1fr);
    gap: 16px 24px; }
  #form { grid-area: form; }
  #below { grid-area: below; }
  #beside { grid-area: beside; position: sticky; top: 0; align-self: start;
    max-height: calc(100vh - 64px); /* what the page keeps free below would push it up */ overflow-y: auto;
    flex-wrap: nowrap; padding: 4px; }
  #beside > * { flex-shrink: 0; }
}
#new-run h2 { margin: 0; }
#form { gap: 10px; }
#form > .row { gap: 10px; }
#form .form { overflow: visible; }
#form > :is(#model-note, #offline, #loaded):not(:has(p)) { display: none; }
#go button { white-space: nowrap; padding-inline: 8px; }
.stale { opacity: 0.4; }
#plan-head { align-items: center; }
#plan-head h2 { margin: 0; white-space: nowrap; }
#plan-head > :first-child { flex: 0 0 auto; width: auto; min-width: 0; }
/* The plan has to stay in sight below these. */
#estimate .figures { grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 6px; }
#estimate .figures > div { padding: 6px 10px; }
#estimate .figures .value { font-size: 1.1rem; }
#preview * { word-break: normal !important; overflow-wrap: anywhere; }

/* What a field is for is a tooltip over its label and while it is focused; what is wrong with it stays. */
.option { overflow: visible !important; position: relative; }
.option:not(.wrong) .info-text { position: absolute; bottom: 100%; left: 0; z-index: 30; width: max-content;
  max-width: min(100%, 34rem); margin: 0; padding: 8px 12px; border-radius: var(--radius-md); background: #1e293b;
  color: #f8fafc; font-size: 0.85rem; line-height: 1.4; box-shadow: 0 4px 14px rgb(0 0 0 / 0.3); pointer-events: none;
  opacity: 0; visibility: hidden; transition: opacity 0.1s 0.4s, visibility 0.1s 0.4s; }
.option:not(.wrong, .quiet):focus-within .info-text,
.option:not(.wrong, .quiet) [data-testid="block-info"]:hover ~ .info-text { opacity: 1; visibility: visible; }
/* Above the labels of other fields, which Gradio puts at 40; a list that is open is in place of the tooltip. */
.option:hover { z-index: 50; }
.option:focus-within { z-index: 60; }
.option:has([role=listbox]) .info-text { display: none; }
.option:not(.wrong) .info-text code { background: none; color: inherit; padding: 0; }
.option [data-testid="block-info"] { cursor: help; text-decoration: underline dotted; text-underline-offset: 4px; }
.wrong input, .wrong textarea { border-color: #b91c1c !important; }
.wrong .info-text { color: var(--bad, #b91c1c) !important; }
.dark .wrong .info-text { color: #fca5a5 !important; }
</style>"""

SCRIPT = """() => {
  const find = (event) => event.target.closest?.('.option');
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && event.isTrusted) find(event)?.classList.add('quiet');
  }, true);
  document.addEventListener('focusin', (event) => {
    const help = find(event)?.querySelector('.info-text');
    if (!help) return;
    help.id ||= `${find(event).id}-help`;
    help.role = 'tooltip';
    event.target.setAttribute('aria-describedby', help.id);
  });
  document.addEventListener('focusout', (event) => find(event)?.classList.remove('quiet'));
}"""
SHOW_PROBLEMS = "() => document.getElementById('problems').scrollIntoView({block: 'nearest'})"
FOCUS = """(name) => { const field = document.getElementById(`option-${name}`) ?? document.getElementById(name);
  // Who is at another field by now is not called back.
  const isThere = document.activeElement === document.body || document.activeElement.closest('#find-option');
  if (isThere) field?.querySelector('textarea, input')?.focus(); }"""
# Gradio shows all of a list that has changed, until the next key: this is one that writes nothing.
REFILTER = """() => { const field = document.activeElement.closest('#option-%s') && document.activeElement;
  field?.dispatchEvent(new KeyboardEvent('keydown', {key: 'Shift', bubbles: true})); }"""

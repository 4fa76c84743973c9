"""The rules of what `markup` draws. Colors, sizes and gaps are Gradio's own variables, which `theme` sets."""

from __future__ import annotations

STYLE = """
.gradio-container { --good: #15803d; --busy: #1d4ed8; --odd: #a16207; --bad: #b91c1c;
  --surface: var(--background-fill-primary); --line: 1px solid var(--border-color-primary); }
.dark .gradio-container, .gradio-container.dark { --good: #4ade80; --busy: #93c5fd; --odd: #facc15; --bad: #fca5a5; }

.html-container { padding: 0 !important; }
.markup { color: var(--body-text-color); line-height: 1.5; font-size: var(--text-md); }
.markup :is(h1, h2) { margin: 0; }
.markup p { margin: var(--spacing-xs) 0; }
.markup a:not(.button) { color: var(--link-text-color); text-decoration: underline; text-underline-offset: 2px; }
.markup code { font-family: var(--font-mono); font-size: 0.95em; }
.subdued { color: var(--body-text-color-subdued); }

.page-head { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between;
  gap: var(--spacing-md) var(--spacing-lg); }
.run-title { display: flex; flex-wrap: wrap; align-items: center; gap: var(--spacing-xs) var(--spacing-lg); }
.run-title h1 { overflow-wrap: anywhere; }

.state { white-space: nowrap; font-weight: 600; }
.state-queued, .state-stopped, .state-canceled, .state-waiting, .state-halved { color: var(--body-text-color-subdued); }
.state-starting, .state-running, .state-stopping { color: var(--busy); }
.state-done { color: var(--good); }
.state-failed { color: var(--bad); }
.state-dead, .state-lost { color: var(--odd); }

/* What matters, large: a number under its name, and below it what it is to be compared with. */
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: var(--spacing-lg);
  margin: var(--spacing-md) 0; }
.figures > div { padding: var(--spacing-lg) var(--spacing-xl); border: var(--line); border-radius: var(--radius-lg);
  background: var(--surface); min-width: 0; }
.figures dt { font-size: var(--text-xs); font-weight: 600; color: var(--body-text-color-subdued); }
.figures dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures .value { font-size: var(--text-xxl); font-weight: 600; line-height: 1.25; letter-spacing: -0.02em; }
.figures dd:not(.value) { font-size: var(--text-xs); color: var(--body-text-color-subdued); }
.markup.stale { opacity: 0.5; }

.facts { display: flex; flex-wrap: wrap; gap: var(--spacing-md) var(--spacing-xxl); margin: var(--spacing-md) 0; }
.facts div { min-width: 0; }
.facts dt { font-size: var(--text-xs); color: var(--body-text-color-subdued); }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }

.phases { display: flex; flex-wrap: wrap; gap: var(--spacing-xs) var(--spacing-xl); list-style: none; padding: 0;
  margin: var(--spacing-md) 0 var(--spacing-sm); font-size: var(--text-sm); }
.phases li { margin: 0; color: var(--body-text-color-subdued); }
.phases li[aria-current] { color: var(--busy); font-weight: 600; }
.bar { height: 6px; border-radius: 3px; overflow: hidden; background: var(--border-color-primary); }
.bar span { display: block; height: 100%; background: var(--color-accent); }
.bar-sentence { margin: var(--spacing-xs) 0 0; font-variant-numeric: tabular-nums; }

.note { --tone: var(--busy); margin: var(--spacing-sm) 0; padding: var(--spacing-md) var(--spacing-lg);
  border: 1px solid color-mix(in srgb, var(--tone) 30%, transparent); border-radius: var(--radius-md);
  background: color-mix(in srgb, var(--tone) 6%, var(--surface)); overflow-wrap: anywhere; }
.note-warning { --tone: var(--odd); }
.note-error { --tone: var(--bad); }

.wide-table { overflow-x: auto; border: var(--line); border-radius: var(--radius-lg); background: var(--surface); }
.wide-table table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0; }
.wide-table caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.markup .wide-table :is(th, td) { padding: var(--spacing-md) var(--spacing-lg); border: 0; border-bottom: var(--line);
  text-align: left; vertical-align: top; }
.wide-table tbody tr:last-child td { border-bottom: 0; }
.wide-table tbody tr:hover { background: var(--background-fill-secondary); }
.wide-table th { color: var(--body-text-color-subdued); font-size: var(--text-xs); font-weight: 600;
  white-space: nowrap; }
.wide-table .number { text-align: right; white-space: nowrap; }
.wide-table td.text { overflow-wrap: break-word; max-width: 24em; min-width: 4em; }
.wide-table th button { all: unset; cursor: pointer; }
.wide-table th button:hover { text-decoration: underline; }
.wide-table th button:focus-visible { outline: 3px solid #2563eb; outline-offset: 2px; }
.wide-table input[type=checkbox] { width: 18px; height: 18px; }
.wide-table input[type=checkbox]:checked { background-color: #2563eb !important; border-color: #2563eb !important; }
.wide-table .said { white-space: pre-wrap; overflow-wrap: anywhere; }
.wide-table :is(.run-name, .reason, .last-part, .run-progress) { width: max-content; }
.wide-table .run-name { max-width: 17em; overflow-wrap: anywhere; }
.wide-table .reason { max-width: 13em; font-size: var(--text-xs); overflow: hidden; overflow-wrap: anywhere;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; }
.wide-table .last-part { max-width: 7em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.wide-table .run-progress { min-width: 6em; }
.wide-table.cards :is(th, td) { padding-inline: 7px; }
.wide-table .date { white-space: pre-line; }
.markup tr:has(.of-sweep:not(.open)) { display: none; }
.wide-table .of-sweep { padding-left: var(--spacing-xl); }
.wide-table .disclosure { all: unset; cursor: pointer; font-size: var(--text-xs); text-decoration: underline;
  color: var(--link-text-color); }
.wide-table .disclosure:focus-visible { outline: 3px solid #2563eb; outline-offset: 2px; }
.trend { display: block; overflow: visible; }
.trend polyline { fill: none; stroke: var(--busy); stroke-width: 1.5; }

.gpus { list-style: none; padding: 0; margin: 0; display: flex; flex-wrap: wrap;
  gap: var(--spacing-xs) var(--spacing-xxl); }

.chart-block { padding: 0 !important; }
.chart-frame { margin: 0; padding: var(--spacing-lg) var(--spacing-lg) 0; border: var(--line);
  border-radius: var(--radius-lg); background: var(--surface); }
.chart-frame figcaption { font-size: var(--text-sm); font-weight: 600; color: var(--body-text-color); }
.chart { min-height: 120px; }
.chart-grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: var(--spacing-xl); }
.chart-grid > .chart-frame:first-child { grid-column: 1 / -1; }
.chart-grid > * { min-width: 0; }
/* Plotly's buttons: in the caption's line and not over the curves; with a finger there is no hover that would end. */
.chart .modebar-container { top: -26px !important; }
@media (hover: none) { .chart .modebar-container { display: none; } }

.links { display: flex; flex-wrap: wrap; gap: var(--spacing-md) var(--spacing-lg); align-items: center; }
.markup .button { display: inline-block; margin: 0 !important; padding: var(--spacing-sm) var(--spacing-xl);
  cursor: pointer; border: 1px solid var(--button-secondary-border-color); border-radius: var(--radius-md);
  color: var(--button-secondary-text-color) !important; text-decoration: none !important;
  background: var(--button-secondary-background-fill); font: inherit; }
.markup .links .button { padding: var(--button-small-padding); font-size: var(--button-small-text-size); }
.markup .button[hidden] { display: none; }
.markup .button:hover { background: var(--button-secondary-background-fill-hover); }
.markup .button[disabled] { color: var(--body-text-color-subdued) !important; background: none; cursor: default;
  border-color: var(--border-color-primary); }
.markup .button-primary { border-color: transparent; font-weight: 600;
  background: var(--button-primary-background-fill); color: var(--button-primary-text-color) !important; }
.markup .button-primary:hover { background: var(--button-primary-background-fill-hover); }

.log { margin: 0; padding: var(--spacing-lg); height: 60vh; overflow: auto; font-family: var(--font-mono);
  font-size: var(--text-xs); border: var(--line); border-radius: var(--radius-lg); background: var(--surface); }

.markup h2:has(+ .talk) { margin-bottom: var(--spacing-sm); }
.talk { display: flex; flex-direction: column-reverse; overflow-y: auto; height: 38vh; min-height: 200px;
  padding: var(--spacing-lg); border: var(--line); border-radius: var(--radius-lg); background: var(--surface); }
.talk > div { margin-bottom: auto; }
.talk .turn { margin: 0 0 var(--spacing-lg); }
.talk .turn-user { margin-left: 12%; padding: var(--spacing-sm) var(--spacing-lg); border-radius: var(--radius-lg);
  background: var(--background-fill-secondary); border: var(--line); }
.talk .who { font-size: var(--text-xs); font-weight: 600; color: var(--body-text-color-subdued); }
.talk .said { white-space: pre-wrap; overflow-wrap: anywhere; }
.talk .subdued { font-size: var(--text-xs); }

.example { margin: var(--spacing-md) 0; padding: var(--spacing-md) var(--spacing-lg); border: var(--line);
  border-radius: var(--radius-lg); background: var(--surface); }
.example h3 { margin: 0; font-size: var(--text-sm); overflow-wrap: anywhere; }
.example .counts { font-size: var(--text-xs); }
.example .seen { white-space: pre-wrap; overflow-wrap: anywhere; font-family: var(--font-mono);
  font-size: var(--text-xs); }
.example details { display: inline; }
.example summary { cursor: pointer; color: var(--link-text-color); text-decoration: underline; margin: 4px 0; }
.seen span, .seen mark { unicode-bidi: isolate; }
.context, .supervised { color: var(--body-text-color); }
.supervised { background: rgba(0, 114, 178, 0.16); border-bottom: 2px solid #0072B2; }
.dark .supervised { background: rgba(86, 180, 233, 0.2); border-bottom-color: #56B4E9; }
.unseen { padding: 0 2px; border: 1px solid var(--bad); border-radius: 3px; color: var(--bad); font-size: 0.8em; }

.figure-notes { margin: 0; font-size: 0.75rem; line-height: 1.25; color: var(--body-text-color-subdued); }
.markup.stale { opacity: 0.5; }
@media (max-width: 640px) {
  .wide-table .date { white-space: normal; }
  .cards .trend-cell { display: flex; align-items: center; gap: var(--spacing-md); }
  .tabs .tab-container button { padding-inline: 6px; }
  .figures { grid-template-columns: 1fr 1fr; gap: var(--spacing-md); }
  .figures > div { padding: var(--spacing-md) var(--spacing-lg); }
  .figures > div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .figures .value { font-size: var(--text-xl); }
  .talk { height: 32vh; }
  .wide-table.cards { border: 0; background: none; }
  .cards :is(table, thead, tbody, tr, td) { display: block; }
  .cards thead tr { display: flex; flex-wrap: wrap; gap: 0 var(--spacing-xs); }
  .cards thead th { border: 0; padding: var(--spacing-sm) var(--spacing-md); }
  .cards thead th:not(:has(button)), .cards td.blank { display: none !important; }
  .cards tbody tr { border: var(--line); border-radius: var(--radius-lg); margin: var(--spacing-md) 0;
    padding: var(--spacing-sm) 0; background: var(--surface); }
  .markup .cards tbody tr:not(:has(.of-sweep:not(.open))) { display: flex; flex-direction: column; }
  .cards td:has(> input[name=runs]) { order: 1; }  /* the name comes first */
  .wide-table.cards :is(td, td.number) { display: flex; justify-content: space-between; gap: var(--spacing-xl);
    border: 0; padding: 2px var(--spacing-lg); text-align: right; white-space: normal; }
  .cards td.text { max-width: none; overflow-wrap: anywhere; }
  .cards td::before { content: attr(data-label); color: var(--body-text-color-subdued); flex: none; }
}
"""

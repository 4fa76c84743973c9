"""What the page "Sweep" shows of a sweep's jobs, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..drawing.job_cells import NUM_JOB_TEXT, list_job_headers, write_job, write_options
from ..drawing.markup import Markup, badge, join, link, note, table, tag
from ..drawing.wording import show_number
from ..reading.sweeps import JobRow, find_best
from ..running.packing import has_adapter


def draw_jobs(jobs: Sequence[JobRow]) -> Markup:
    """Return the table of the jobs, the best first, each with the button that stops it alone."""
    if not jobs:
        return note("The sweep has no jobs yet.")
    headers = (*list_job_headers(jobs), "stop")
    return table(headers, [_draw_job(job) for job in jobs], "Jobs", NUM_JOB_TEXT, class_="cards")


def draw_best(jobs: Sequence[JobRow], root: Path) -> Markup:
    """Return which job is the best so far, with links to what its adapter is for."""
    best = find_best(jobs)
    if best is None:
        return Markup("")
    metric = best.metric.replace("_", " ")
    words: list[str] = [tag("strong", "Best so far: "), link("run", best.name, name=best.run)]
    words.append(f", {metric} {show_number(best.value)} ({write_options(best)})")
    links = [link(page, page.capitalize(), "button", run=best.run) for page in ("chat", "export")]
    nav = tag("nav", *links, class_="links", aria_label="the best job elsewhere")
    return join((tag("p", *words), nav if has_adapter(root / best.run) else ""))


def _draw_job(job: JobRow) -> list[str]:
    cells = list(write_job(job))
    if job.summary is not None:
        cells[0] = tag("div", link("run", job.name, name=job.run), class_="run-name")
    why = tag("div", job.why, class_="reason subdued", title=job.why) if job.why else ""
    cells[1] = tag("div", badge(job.state), why)
    words = {"type": "button", "class_": "button", "data_stop": job.name, "aria_label": f"Stop the job {job.name}"}
    return [*cells, tag("button", "Stop this job", **words) if job.can_stop else ""]

"""Apply the present rules to stored records: ``python results/reproduce/refresh.py [NAME ...]``.

Rewrites the claims in ``results.json`` of each experiment, its figure and page, and
``docs/gallery.md``. Numbers stay as they were measured. With ``--same-rules``, the records also get
the digest of the present rules: use it if a change of the rules' form, not of their meaning,
changed the digest.
"""

from __future__ import annotations

import argparse
import html
import json
import re
from pathlib import Path

from gallery_page import save_gallery_markdown

from recollect.experiments import EXPERIMENTS, Record, Results, Run
from recollect.experiments.framework.report import save_run
from recollect.report.environment import Environment

FOLDER = Path(__file__).parent


def refresh(name: str, *, same_rules: bool) -> None:
    """Rewrite the files of one experiment, and print the claims whose status changed."""
    folder, experiment = FOLDER / name, EXPERIMENTS[name]
    data = json.loads((folder / "results.json").read_text("utf-8"))
    page = (folder / "report.html").read_text("utf-8")
    command = re.search(r"recollect reproduce [^<]*", page)
    assert command is not None, f"{folder / 'report.html'} has no command"
    before = {claim["name"]: claim["verdict"] for claim in data["claims"]}
    if same_rules:
        for record in data["records"]:
            record["rules"] = experiment.rules_digest
    records = tuple(map(Record.from_dict, data["records"]))
    results = Results(records=records, scale=data["scale"], config=data["config"])
    verdicts = experiment.verdicts(results)
    for claim, verdict in verdicts:
        if before.get(claim.name) != verdict.status:
            print(f"{name}, {claim.name}: {before.get(claim.name)} before, {verdict.status} now")
    run = Run(
        experiment=experiment,
        results=results,
        verdicts=tuple(verdicts),
        environment=Environment(**data["environment"]),
        complete=data["complete"],
        folder=folder,
        jobs=1,
        command=html.unescape(command[0]),
    )
    (folder / "report.html").unlink()  # or an older form of the page would stay as a copy
    save_run(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all by default")
    parser.add_argument("--same-rules", action="store_true")
    arguments = parser.parse_args()
    for experiment_name in arguments.names or EXPERIMENTS:
        refresh(experiment_name, same_rules=arguments.same_rules)
    save_gallery_markdown(FOLDER, FOLDER.parents[1] / "docs" / "gallery.md")

"""Apply the present rules to stored records: ``python results/reproduce/refresh.py [NAME ...]``.

Rewrites the claims in ``results.json`` of each experiment, and ``docs/gallery.md``. Numbers stay as
they were measured. With ``--same-rules``, the records also get the digest of the present rules: use
it if a change of the rules' form, not of their meaning, changed the digest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recollect.experiments import EXPERIMENTS, Record, Results
from recollect.experiments.gallery import save_gallery_markdown

FOLDER = Path(__file__).parent


def refresh(name: str, *, same_rules: bool) -> None:
    """Rewrite the claims of one experiment, and print those whose status changed."""
    path, experiment = FOLDER / name / "results.json", EXPERIMENTS[name]
    data = json.loads(path.read_text("utf-8"))
    before = {claim["name"]: claim["verdict"] for claim in data["claims"]}
    if same_rules:
        for record in data["records"]:
            record["rules"] = experiment.rules_digest
    records = tuple(map(Record.from_dict, data["records"]))
    results = Results(records=records, scale=data["scale"], config=data["config"])
    verdicts = experiment.verdicts(results)
    data |= {
        "schema": 2,
        "claims": [claim.to_dict(verdict) for claim, verdict in verdicts],
        "rules": experiment.rules_digest,
    }
    for claim, verdict in verdicts:
        if before.get(claim.name) != verdict.status:
            print(f"{name}, {claim.name}: {before.get(claim.name)} before, {verdict.status} now")
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all by default")
    parser.add_argument("--same-rules", action="store_true")
    arguments = parser.parse_args()
    for experiment_name in arguments.names or EXPERIMENTS:
        refresh(experiment_name, same_rules=arguments.same_rules)
    save_gallery_markdown(FOLDER, FOLDER.parents[1] / "docs" / "gallery.md")

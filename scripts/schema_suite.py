"""What becomes of a suite of JSON schemas at the token level: refused, valid instances rejected, invalid ones accepted.

    python scripts/schema_suite.py PATH [--draft draft2020-12 --draft draft7] [--failures]

PATH is a JSON-Schema-Test-Suite folder (with `tests/`): it ships in the source distribution of the `jsonschema`
package, under `json/`:

    pip download --no-binary :all: --no-deps jsonschema && tar xzf jsonschema-*.tar.gz

Groups of the required part are judged as JSON Schema means them, so objects are open here, whatever the server's
default for its callers is. An instance is written as the server writes JSON (one space after `:` and `,`, integral
numbers as integers; the order of properties is the grammar's, so it counts if it fits in any) and given to the grammar
token by token, in the default model's own tokens. A group counts as refused if its schema is. `format.json` is left out
of the rejected ones: it says that formats are annotations by default, and the server keeps to those it knows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from quire.bench.schema_judge import SchemaJudge
from quire.types.errors import InputError

DIALECT = {"draft7": "http://json-schema.org/draft-07/schema#"}


def report(folder: Path, draft: str, judge: SchemaJudge, failures: bool) -> bool:
    counts: dict[str, Counter[str]] = {}
    for path in sorted((folder / "tests" / draft).glob("*.json")):
        found = counts.setdefault(path.stem, Counter())
        for group in json.loads(path.read_text()):
            found["groups"] += 1
            schema = group["schema"]
            if draft in DIALECT and isinstance(schema, dict):
                schema = {"$schema": DIALECT[draft]} | schema
            unlike = [test for test in group["tests"] if not test["valid"]]
            try:
                grammar = judge.compile(schema)
            except InputError as error:
                if "no value fits" in str(error) and len(unlike) == len(group["tests"]):
                    found["never"] += 1  # rightly: there is nothing to say
                    continue
                found["refused"] += 1
                if failures:
                    print(f"  refused: {path.stem}: {group['description']}: {str(error)[:150]}")
                continue
            for test in group["tests"]:
                accepted = judge.takes(grammar, test["data"])
                kind = "valid" if test["valid"] else "invalid"
                found[kind] += 1
                if accepted != test["valid"]:
                    found[f"{kind} wrong"] += 1
                    if failures:
                        print(
                            f"  {kind} {'rejected' if test['valid'] else 'ACCEPTED'}: {path.stem}: "
                            f"{group['description']}: {test['description']}: {json.dumps(test['data'])[:100]}"
                        )
    return _print(draft, counts)


def _print(draft: str, counts: dict[str, Counter[str]]) -> bool:
    print(f"{draft:24} groups refused   valid rejected   invalid accepted")
    for name, found in counts.items():
        if found["refused"] or found["valid wrong"] or found["invalid wrong"]:
            print(
                f"  {name:22} {found['groups']:6} {found['refused']:7} {found['valid']:7} {found['valid wrong']:8} "
                f"{found['invalid']:9} {found['invalid wrong']:8}"
            )
    whole: Counter[str] = sum(counts.values(), Counter())
    rejected = whole["valid wrong"] - counts.get("format", Counter())["valid wrong"]
    share = 100 * whole["refused"] / max(1, whole["groups"])
    print(
        f"  all: {whole['refused']} of {whole['groups']} groups refused ({share:.1f}%), {rejected} of {whole['valid']} "
        f"valid rejected ({100 * rejected / max(1, whole['valid']):.2f}%), {whole['invalid wrong']} of "
        f"{whole['invalid']} invalid accepted, {whole['never']} groups that nothing fits"
    )
    return not whole["invalid wrong"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--draft", action="append")
    parser.add_argument("--failures", action="store_true", help="name each")
    given = parser.parse_args()
    judge = SchemaJudge()
    good = [report(given.path, draft, judge, given.failures) for draft in given.draft or ["draft2020-12", "draft7"]]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

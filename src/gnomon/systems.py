"""The one table of the systems Gnomon carries or plans: strings only, imports nothing of Gnomon.

It is the single source for `gnomon ls`, `gnomon show`, the README table and the board. `title` is the
paper's own where it is known; elsewhere it describes the system, and `paper` says that the title is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SYSTEMS", "System", "find"]


@dataclass(frozen=True)
class System:
    """One published method, benchmark or world."""

    slug: str
    """Name on the command line; `-` and `_` are equal there."""
    name: str
    """Short name in print."""
    family: str
    """Folder below `gnomon.methods` (or `worlds`) that holds the part."""
    title: str
    """Title of the paper, or a description where `paper` says that the title is unknown."""
    venue: str
    paper: str
    """arXiv id, or a note on what is known instead."""
    summary: str
    """What it does, in one line."""
    extras: tuple[str, ...] = ()
    """Optional dependency groups that its part or study needs."""
    status: Literal["works", "planned"] = "planned"
    study: str = ""
    """Module of the study; empty while planned."""
    apply: tuple[str, ...] = ()
    """What `gnomon apply` offers, as `name=module`; the module's `METHOD` does it."""


SYSTEMS: tuple[System, ...] = (
    System(
        "poet",
        "POET",
        "optim",
        "Reparameterized LLM Training via Orthogonal Equivalence Transformation",
        "NeurIPS 2025",
        "arXiv:2506.08001",
        "Trains two orthogonal matrices around a frozen random weight, so that its spectrum never changes.",
        status="works",
        study="gnomon.studies.poet",
    ),
    System(
        "bread",
        "BREAD",
        "optim",
        "Accelerating Block Coordinate Descent for LLM Finetuning via Landscape Expansion",
        "NeurIPS 2025",
        "no arXiv id known",
        "Fine-tunes one block at a time and cheaply updates the others in the same backward pass.",
        extras=("train",),
        status="works",
        study="gnomon.studies.bread",
    ),
    System(
        "numuon",
        "NuMuon",
        "optim",
        "NuMuon: Nuclear-Norm-Constrained Muon for Compressible LLM Training",
        "NeurIPS 2026",
        "arXiv:2603.03597",
        "Muon with a budget on the update's nuclear norm, so that trained weights compress better.",
        status="works",
        study="gnomon.studies.numuon",
        apply=("lowrank=gnomon.methods.compress.lowrank.apply",),
    ),
    System(
        "mglu",
        "MGLU",
        "layers",
        "Masked Gated Linear Unit",
        "NeurIPS 2025",
        "arXiv:2506.23225",
        "A gated feed-forward layer with one weight matrix, split into gate and value by binary masks.",
        status="works",
        study="gnomon.studies.mglu",
    ),
    System(
        "saga",
        "SAGA",
        "layers",
        "More Value per Key: Asymmetric Sparse Attention for Faster LLM Decoding",
        "NeurIPS 2026",
        "arXiv:2610.04753",
        "Attention with fewer key heads than value heads and an approximate top-N choice of keys.",
        status="works",
        study="gnomon.studies.saga",
        apply=("saga=gnomon.methods.layers.saga.apply",),
    ),
    System(
        "mage",
        "MAGE",
        "layers",
        "MAGE: All-[MASK] Block Already Knows Where to Look in (Block) Diffusion LLM",
        "NeurIPS 2026",
        "arXiv:2602.14209",
        "One exact attention pass per block picks the cached tokens for all its denoising steps.",
        status="works",
        study="gnomon.studies.mage",
    ),
    System(
        "set-llm",
        "Set-LLM",
        "layers",
        "Set-LLM: A Permutation-Invariant LLM",
        "NeurIPS 2025",
        "arXiv:2505.15433",
        "Positions and an attention mask that make a decoder blind to the order of listed items.",
        extras=("train",),
        status="works",
        study="gnomon.studies.set_llm",
    ),
    System(
        "nf12",
        "NF12",
        "compress",
        "NyoomFloat12 (NF12)",
        "NeurIPS 2026",
        "no arXiv id known",
        "Stores BF16 weights without loss in 12 bits of fixed length, decoded inside the matrix product.",
        status="works",
        study="gnomon.studies.nf12",
        apply=("nf12=gnomon.methods.compress.nf12.apply",),
    ),
    System(
        "lua",
        "Lua-LLM",
        "compress",
        "Lua-LLM: Learning Unstructured-Sparsity Allocation for Large Language Models",
        "NeurIPS 2025",
        "no arXiv id known",
        "Learns one pruning threshold per weight row end to end, inside and across layers.",
        status="works",
        study="gnomon.studies.lua",
        apply=("lua=gnomon.methods.compress.lua.apply",),
    ),
    System(
        "shapley",
        "Model Shapley",
        "compress",
        "MODEL SHAPLEY: Find Your Ideal Parameter Player via One Gradient Backpropagation",
        "NeurIPS 2025",
        "no arXiv id known",
        "Estimates each parameter's Shapley value from one backward pass and a second-order term.",
        status="works",
        study="gnomon.studies.shapley",
    ),
    System(
        "tlcm",
        "TLCM",
        "interpret",
        "LLM Layers Immediately Correct Each Other",
        "NeurIPS 2025",
        "arXiv:2609.07876",
        "Measures how much of what a layer writes to the residual stream the next layer takes back.",
        status="works",
        study="gnomon.studies.tlcm",
    ),
    System(
        "openunlearning",
        "OpenUnlearning",
        "unlearn",
        "OpenUnlearning: Accelerating LLM Unlearning via Unified Benchmarking of Methods and Metrics",
        "NeurIPS 2025 Datasets & Benchmarks",
        "arXiv:2506.12618",
        "Unlearning algorithms, metrics and benchmarks in one frame, and a test of the metrics themselves.",
    ),
    System(
        "ra2",
        "RA²",
        "unlearn",
        "Retain-Anchored Attraction (RA²)",
        "NeurIPS 2026",
        "title beyond the name and arXiv id unknown",
        "Unlearns by drawing hidden states of forget tokens to nearby states that retained text supports.",
    ),
    System(
        "tbrm",
        "TBRM",
        "posttrain",
        "Trajectory Bellman Residual Minimization: A Simple Value-Based Method for LLM Reasoning",
        "NeurIPS 2025",
        "arXiv:2505.15311",
        "Off-policy reinforcement learning without a critic: one squared Bellman residual per trajectory.",
    ),
    System(
        "mosa",
        "MOSA",
        "posttrain",
        "Mean Order-Statistic Alignment (MOSA)",
        "NeurIPS 2026",
        "full title and arXiv id unknown",
        "Keeps exploration in RL by aligning sorted token-probability profiles with the base model's.",
    ),
    System(
        "opct",
        "OPCT",
        "posttrain",
        "On-Policy Consistency Training Improves LLM Safety with Minimal Capability Degradation",
        "NeurIPS 2026",
        "arXiv:2605.21834",
        "Trains a model on its own answers to perturbed prompts, judged by its frozen copy on clean ones.",
    ),
    System(
        "progress_advantage",
        "Progress Advantage",
        "posttrain",
        "Neglected Free Lunch from Post-training: Progress Advantage for LLM Agents",
        "NeurIPS 2026",
        "arXiv:2606.26080",
        "Scores an agent's steps by the log-ratio of the trained policy and its reference.",
    ),
    System(
        "meta_preference",
        "Meta-alignment",
        "posttrain",
        "Meta-learning for RLHF and DPO across languages",
        "NeurIPS 2026",
        "title and arXiv id unknown",
        "Meta-learns a start from which preference training adapts to a new language with few pairs.",
    ),
    System(
        "tops",
        "TOPS",
        "posttrain",
        "Towards Thinking-Optimal Scaling of Test-Time Compute for LLM Reasoning",
        "NeurIPS 2025",
        "arXiv:2502.18080",
        "Teaches several reasoning efforts, then trains on the model's own shortest correct answer.",
    ),
    System(
        "minpath",
        "MinPath",
        "posttrain",
        "MinPath: compressing chains of thought by their minimal dependency path",
        "NeurIPS 2026",
        "title and arXiv id unknown",
        "Turns a chain of thought into a typed graph and trains on the steps the answer depends on.",
    ),
    System(
        "svdecode",
        "SVDecode",
        "decode",
        "Distribution-Aligned Decoding for Efficient LLM Task Adaptation",
        "NeurIPS 2025",
        "arXiv:2509.15888",
        "Steers decoding along the way in which a short fine-tuning moved the output distribution.",
    ),
    System(
        "daca",
        "DACA",
        "decode",
        "Your Pre-trained LLM is Secretly an Unsupervised Confidence Calibrator",
        "NeurIPS 2025",
        "arXiv:2505.16690",
        "Calibrates a post-trained model, without labels, where it agrees with its pre-trained ancestor.",
    ),
    System(
        "gap_correction",
        "Gap correction",
        "decode",
        "Gap correction: when more corrective information harms",
        "NeurIPS 2026",
        "title and arXiv id unknown",
        "Predicts when added context corrects an answer too far, and picks context by expected error.",
    ),
    System(
        "lookahead",
        "Lookahead",
        "decode",
        "Lookahead Routing for Large Language Models",
        "NeurIPS 2025",
        "arXiv:2510.19506",
        "Routes a query to a model by predicting a latent of each candidate's answer without decoding it.",
    ),
    System(
        "tail_lru",
        "Tail-Optimized LRU",
        "serve",
        "Tail-Optimized Caching for LLM Inference",
        "NeurIPS 2025",
        "arXiv:2510.15152",
        "Evicts first the cached prompts that cannot hurt the slowest requests, then falls back to LRU.",
        status="works",
        study="gnomon.studies.tail_lru",
    ),
    System(
        "pace",
        "Pace",
        "serve",
        "Regulating Branch Parallelism in LLM Serving",
        "NeurIPS 2026",
        "arXiv:2605.06914",
        "Decides at each decoding step how many parallel branches the batch's latency slack can carry.",
        status="works",
        study="gnomon.studies.pace",
    ),
    System(
        "grid",
        "GRiD",
        "reason",
        "Dependency Matters: Enhancing LLM Reasoning with Explicit Knowledge Grounding",
        "NeurIPS 2025",
        "no arXiv id known",
        "Reasoning as a graph of facts and inferences, each step checked against its stated premises.",
    ),
    System(
        "debate",
        "Debate ledger",
        "reason",
        "An auditable ledger for multi-agent debate",
        "NeurIPS 2026",
        "title and arXiv id unknown",
        "Books each change of answer in a debate as collapse or correction, and prices interventions.",
    ),
    System(
        "walle",
        "WALL-E",
        "agents",
        "WALL-E: World Alignment by NeuroSymbolic Learning improves World Model-based LLM Agents",
        "NeurIPS 2025",
        "arXiv:2504.15785",
        "Learns symbolic rules of an environment and plans with a language model that these rules correct.",
    ),
    System(
        "cgi",
        "CGI",
        "agents",
        "The Lighthouse of Language: Enhancing LLM Agents via Critique-Guided Improvement",
        "NeurIPS 2025",
        "arXiv:2503.16024",
        "A trained critic writes structured critiques, and the actor is trained to act on them.",
    ),
    System(
        "orchestra",
        "OrchestraRL",
        "agents",
        "OrchestraRL: learned communication between frozen agents",
        "NeurIPS 2026",
        "title beyond the name and arXiv id unknown",
        "A small trained layer decides when, how and with whom frozen agents communicate.",
    ),
    System(
        "probe",
        "PROBE",
        "agents",
        "Policy Rule Observation via Behavioral Exploration (PROBE)",
        "NeurIPS 2026",
        "title beyond the name and arXiv id unknown",
        "Trains auditors that act as plausible users and find where an agent breaks its own policies.",
    ),
    System(
        "pall",
        "PALL",
        "search",
        "PALL: process-aware large neighbourhood search",
        "NeurIPS 2026",
        "full title and arXiv id unknown",
        "Large neighbourhood search for integer programs in which a language model picks the next operator.",
    ),
    System(
        "supergpqa",
        "SuperGPQA",
        "worlds",
        "SuperGPQA: Scaling LLM Evaluation across 285 Graduate Disciplines",
        "NeurIPS 2025 Datasets & Benchmarks",
        "arXiv:2502.14739",
        "Graduate multiple choice in 285 fields, and the filter of models and experts that made it.",
    ),
    System(
        "proofrank",
        "ProofRank",
        "worlds",
        "Not All Proofs Are Equal: Evaluating LLM Proof Quality Beyond Correctness",
        "NeurIPS 2026",
        "arXiv:2605.10379",
        "Scores correct proofs for brevity, ease, simplicity, diversity and adaptivity.",
    ),
    System(
        "fle",
        "Factorio Learning Environment",
        "worlds",
        "Factorio Learning Environment",
        "NeurIPS 2025",
        "arXiv:2503.09617",
        "Agents write Python to build factories: bounded throughput tasks and an open map.",
    ),
    System(
        "pcb",
        "PCBInnoBench",
        "worlds",
        "PCBInnoBench: KiCad design and upgrade tasks",
        "NeurIPS 2026",
        "title line not seen; no arXiv id known",
        "Agents edit circuit-board projects, judged by hidden validators of structure and constraints.",
    ),
    System(
        "memeeconomy",
        "MemeEconomy",
        "worlds",
        "MemeEconomy: Do LLM Agents Trade Ethics for Survival?",
        "NeurIPS 2026",
        "no arXiv id yet",
        "A simulated attention market in which agents under pressure may choose harmful content.",
    ),
)


def find(slug: str) -> System:
    """The row of `slug`, where `-` and `_` are equal.

    Raises:
        KeyError: no such system (this module knows nothing of Gnomon's own errors).
    """
    wanted = slug.replace("-", "_")
    for system in SYSTEMS:
        if system.slug.replace("-", "_") == wanted:
            return system
    raise KeyError(slug)

"""Package metadata of megatron_anchor; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="megatron-anchor",
    version="0.1.0",
    description="AnchorAttention for long-context GPT training with Megatron-Core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_anchor", "megatron_anchor.*"]),
    package_data={"megatron_anchor": ["py.typed"]},
    entry_points={"console_scripts": ["megatron-anchor = megatron_anchor.console:main"]},
    python_requires=">=3.12",
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.19.2,<0.21",
        "numpy>=2.0",
        "numba>=0.63",
        "transformers>=5.10.1",
        "tokenizers>=0.22",
        "sentencepiece>=0.2",
        "tiktoken>=0.9",
        "safetensors>=0.5",
        "datasets>=4.0",
        "nltk>=3.9.1",
        "tqdm>=4.66.3",
        "psutil>=6.0",  # Megatron's checkpoint writer imports it in its worker processes
        "einops>=0.8",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.18"],
        "flash": ["flash-attn>=2.8"],
        "plot": ["matplotlib>=3.9"],
        "eval": ["lm-eval[hf,ruler]>=0.4.9"],
        "zstd": ["zstandard>=0.23"],
        "fast": ["gigatoken>=0.10", "orjson"],
        "ray": ["ray>=2.40"],
        "dev": [
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "tensorboard>=2.18",
            "matplotlib>=3.9",
            "zstandard>=0.23",
        ],
        "docs": ["mkdocs-material>=9.6"],
    },
    keywords="megatron, long context, attention, rope, packing, pretraining",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

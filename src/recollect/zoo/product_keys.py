"""Memories whose tokens write and read a few slots of many.

Examples:
    >>> rc.zoo.names("product_keys")
    ['product_key_memory']
    >>> print(rc.zoo.get("product_key_memory").rule)
    M_t = M_(t−1) − η_t (M_(t−1) φ(k_t) − v_t) φ(k_t)ᵀ,  y_t = M_t φ(q_t)
"""

from __future__ import annotations

from recollect.choices.features.product_keys import ProductKeys
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["product_key_memory"]


@preset(
    "product-key memory with fast weights",
    rule="M_t = M_(t−1) − η_t (M_(t−1) φ(k_t) − v_t) φ(k_t)ᵀ,  y_t = M_t φ(q_t)",
    references=(
        Paper("Lample et al., Large memory layers with product keys", 2019).at(
            "section 3", introduces=False
        ),
        Paper("Zhao and Jones, Fast-weight product key memory", 2026).at(
            "arXiv 2601.00671, memory-rewrite objective"
        ),
    ),
    fidelity=reconstruction(
        "the slots of Lample et al., section 3, with values written by the gradient of a squared "
        "error as Zhao and Jones describe",
        source_equation="I = T_k(K q(x)),  w = Softmax((q(x)ᵀ k_i)_(i∈I)),  "
        "m(x) = Σ_(i∈I) w_i v_i  (Lample et al., section 3)",
        features="The sub-keys are parameters; Zhao and Jones also write them.\n"
        "Keys and queries have sub-keys in common.",
        gates="The rate is a gate of the token.",
        step="Each token writes; Zhao and Jones write once per chunk.",
        sizes="16 sub-keys per half and the best 8 of 256 slots; Lample et al. have 512 and 32.",
        layer="Queries and keys have length √K, with the common layer around the memory.",
    ),
)
def product_key_memory() -> tuple[Recipe, LayerOptions]:
    """The delta rule on the values of the few slots that fit a key."""
    return Recipe(features=ProductKeys()), LayerOptions(qk_norm="rms")

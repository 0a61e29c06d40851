"""The tables of what works together: each cell that claims something has a test, and that is there."""

from __future__ import annotations

import ast
import re

import pytest
from snippets import ROOT

LINEAR, SHARDED, PARALLEL = "tests/nn/test_linear.py", "tests/distributed", "tests/distributed/test_parallel"
GROUPED, EXPERTS = "tests/nn/test_grouped_linear.py", "tests/distributed/test_expert_parallel.py"
LAYOUTS = "tests/calibration/test_layouts_of_experts.py"
RECIPES, OTHER_WAYS = f"{SHARDED}/test_every_recipe.py", f"{SHARDED}/test_grouped_sharded.py::other_ways_of_training"
NOTHING = ""
TABLES: dict[str, dict[str, tuple[str, str, str]]] = {
    "Linear layers": {
        "every named recipe": (
            f"{LINEAR}::the_three_gemms_multiply_the_encoded_operands", f"{SHARDED}/test_fsdp.py::named_recipes",
            f"{RECIPES}::layers_that_ranks_share_out",
        ),
        "every format, and hybrids of any two": (
            "lpq/testing/conformance/test_linear.py::three_gemms_are_products_of_operands",
            f"{SHARDED}/test_gathered_bytes.py::bytes",
            "lpq/testing/conformance/test_ranks.py::ranks_encode_parts_as_in_the_whole",
        ),
        "formats of third parties": (
            "tests/testing/test_new_plugin.py::it_installs_is_listed_and_its_tests_are_the_kit",
            f"{SHARDED}/test_gathered_bytes.py::bytes", f"{PARALLEL}_operands.py::operands_of_a_sequence",
        ),
        "`torch.compile`": (
            f"{LINEAR}::compiled_without_a_break_is_bitwise_eager_for_any_batch_and_with_held_weights",
            f"{SHARDED}/test_fsdp.py::compiled", f"{PARALLEL}_combined.py::compiled",
        ),
        "activation checkpointing": (
            f"{LINEAR}::checkpointing_gives_the_same_gradients",
            f"{SHARDED}/test_fsdp.py::stored_weights",
            f"{PARALLEL}_combined.py::checkpointed",
        ),
        "gradient accumulation": (
            "tests/nn/test_accumulate.py::the_sum_in_grad_is_autograds",
            f"{SHARDED}/test_fsdp.py::stored_weights",
            f"{RECIPES}::layers_that_ranks_share_out",
        ),
        '`weights="quantized"`': (
            f"{LINEAR}::a_weight_stored_quantized_gives_the_same_products_compiled_too",
            f"{SHARDED}/test_fsdp.py::stored_weights",
            f"{SHARDED}/test_tensor_parallel.py::what_cannot_be_shared_out_is_refused_by_the_name_of_the_layer",
        ),
        "FSDP2": (NOTHING, NOTHING, f"{PARALLEL}_combined.py::with_fsdp2"),
        'FSDP2 with `weights="high_precision"`': (
            NOTHING,
            f"{SHARDED}/test_fsdp.py::every_optimizer",
            f"{SHARDED}/test_sharded_twice.py::training_is_that_of_weights_in_high_precision",
        ),
        "checkpoints that are loaded on another layout": (
            "tests/checkpoint/test_resharding.py::training_goes_on_from_four_on_two_and_one",
            "tests/checkpoint/test_resharding.py::four_two_one_four",
            f"{PARALLEL}_combined.py::a_checkpoint_loads_on_another_layout",
        ),
        "calibrated scales": (
            "tests/nn/test_static.py::forward_multiplies_by_static_statistics_and_no_step_moves_them",
            "tests/calibration/test_layouts.py::fsdp_over_1_2_and_4_ranks",
            "tests/calibration/test_layouts.py::tensor_parallelism_over_2_and_4_ranks",
        ),
        "export to engines": (
            "tests/engines/test_export.py::a_user_exports_a_model",
            "tests/engines/test_sharded_export.py::a_sharded_model_is_exported_as_it_is_unsharded",
            "tests/engines/test_sharded_export.py::layers_that_ranks_share_out_are_exported_as_of_one",
        ),
    },
    "Experts": {
        "every named recipe, but those that remember": (
            f"{GROUPED}::it_is_separate_linears_bit_for_bit",
            f"{SHARDED}/test_grouped_sharded.py::named_recipes",
            f"{RECIPES}::experts_that_ranks_share_out",
        ),
        "a recipe with one scale for a tensor, with blocks, a hybrid": (
            f"{GROUPED}::it_is_separate_linears_bit_for_bit",
            f"{SHARDED}/test_grouped_sharded.py::two_ranks_compute_what_one_does",
            f"{RECIPES}::experts_that_ranks_share_out",
        ),
        "every format, third parties' too": (
            "lpq/testing/conformance/test_groups.py::a_group_is_encoded_by_itself",
            "lpq/testing/conformance/test_groups.py::a_group_is_encoded_by_itself",  # ranks hold whole experts
            f"{RECIPES}::every_format_of_experts_that_ranks_share_out",
        ),
        "a recipe that remembers statistics": (f"{GROUPED}::what_is_not_built_is_refused_in_words",) * 3,
        "experts of Hugging Face's models": (
            "tests/integrations/test_experts.py::they_are_separate_layers_to_the_bit",
            "tests/integrations/test_experts_over_ranks.py::experts_that_fsdp_shards",
            "tests/integrations/test_experts_over_ranks.py::experts_over_ranks",
        ),
        "rows that travel encoded": (NOTHING, NOTHING, f"{EXPERTS}::rows_that_travel_encoded"),
        "`torch.compile`": (
            f"{GROUPED}::compiled_in_one_graph_it_is_the_layer", OTHER_WAYS,
            f"{EXPERTS}::compiled_it_computes_the_same",
        ),
        "activation checkpointing": (
            f"{GROUPED}::activation_checkpointing_computes_the_same", OTHER_WAYS,
            f"{EXPERTS}::rows_that_travel_encoded",
        ),
        "gradient accumulation": (
            f"{GROUPED}::gradients_accumulate", OTHER_WAYS, f"{RECIPES}::experts_that_ranks_share_out",
        ),
        '`weights="quantized"`': (
            f"{SHARDED}/test_grouped_sharded.py::two_ranks_compute_what_one_does",
            f"{SHARDED}/test_grouped_sharded.py::two_ranks_compute_what_one_does",
            f"{EXPERTS}::what_ranks_cannot_share_out_is_refused",
        ),
        "FSDP2": (NOTHING, NOTHING, f"{EXPERTS}::experts_and_fsdp"),
        "checkpoints that are loaded on another layout": (
            f"{SHARDED}/test_grouped_sharded.py::a_checkpoint_of_two_ranks_loads_on_two_and_on_one",
            f"{SHARDED}/test_grouped_sharded.py::a_checkpoint_of_two_ranks_loads_on_two_and_on_one",
            f"{EXPERTS}::a_checkpoint_loads_on_another_number_of_ranks",
        ),
        "calibrated scales": (
            "tests/calibration/test_calibrated_experts.py::experts_in_stacks_are_calibrated_as_separate_layers",
            *(f"{LAYOUTS}::experts_beside_tensor_parallelism_and_fsdp_over_4_ranks",) * 2,
        ),
        "export to engines": (
            "tests/engines/test_export_experts.py::each_expert_has_the_bytes_of_a_layer",
            *("tests/engines/test_export_experts.py::experts_of_several_ranks_are_exported_as_of_one",) * 2,
        ),
    },
}  # fmt: skip
"""For each row the tests of its cells, and nothing where the cell has no meaning."""
REFUSED = ("what_cannot_be_shared_out", "what_is_not_built", "what_ranks_cannot_share_out")


def cell(test: str) -> str:
    """The cell that the page has in place of a test."""
    if test == NOTHING:
        return test
    return "refused" if test.partition("::")[2].startswith(REFUSED) else "✓"


@pytest.mark.parametrize("title", TABLES)
def test_the_page_claims_what_is_tested(title: str) -> None:
    page = (ROOT / "docs" / "combinations.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = [[*map(str.strip, line.strip("|").split("|"))] for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
    assert found[2:] == [[row, *map(cell, tests)] for row, tests in TABLES[title].items()]


def test_each_test_is_there() -> None:
    named = {test for table in TABLES.values() for tests in table.values() for test in tests if "::" in test}
    for test in sorted(named):
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert f"test_{name}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test

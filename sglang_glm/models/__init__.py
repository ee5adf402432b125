"""The model classes that SGLang loads for `glm_moe_dsa`. SGLang imports every module in here."""

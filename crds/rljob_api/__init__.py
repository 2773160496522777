"""The RLJob API: the types of RLJob and StepReport, their validation, and the CRDs generated from them."""

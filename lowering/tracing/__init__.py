"""What AOTAutograd and Dynamo are told while they trace: decompositions, and operators that stay whole or are taken apart otherwise."""

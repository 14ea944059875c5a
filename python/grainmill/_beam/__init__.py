"""Reading and writing ArrayRecord files from Apache Beam."""

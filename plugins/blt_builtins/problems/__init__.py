"""Problems other than images: regression, classification, data cleaning, few-shot learning."""

// SPDX-License-Identifier: Apache-2.0
#include "schema.hpp"

namespace tessera::cli {

Json with_schema(const Json& document, const std::string& command, const std::string& variant) {
    if (document.is_array()) {
        Json list = Json::array();
        for (const Json& entry : document) list.push_back(with_schema(entry, command, variant));
        return list;
    }
    if (!document.is_object() || document.contains("schema")) return document;
    std::string schema = "tessera";
    for (const std::string* part : {&command, &variant})
        if (!part->empty()) schema += "." + *part;
    Json result{{"schema", schema + "/1"}};
    for (const auto& [key, value] : document.items()) result[key] = value;
    return result;
}

}  // namespace tessera::cli

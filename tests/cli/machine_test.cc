// SPDX-License-Identifier: Apache-2.0
//
// tessera machine: built-in machines as files that are edited and read back.
#include "measure/machine_file.hpp"
#include "process.hpp"

namespace tessera::machine_command_test {
namespace {

class MachineCommandTest : public CommandTest {
 protected:
    /// Predicted milliseconds of one call on a machine.
    double ms_on(const std::string& device) const {
        return run_ok("roofline --len 8192 --heads 16 --head-dim 128 --schedule fa2 --json --device " + device)
            .json()
            .at("rows")
            .at(0)
            .at("schedules")
            .at(0)
            .at("ms")
            .get<double>();
    }
};

TEST_F(MachineCommandTest, every_machine_is_listed_written_and_read_back) {
    const auto listed = run_ok("machine --json").json().at("machines");
    ASSERT_EQ(listed.size(), model::machines().size());
    const Outcome text = run_ok("machine");
    for (const model::Machine& machine : model::machines()) {
        expect_says(text, machine.title.substr(0, machine.title.find(',')));
        const std::string written = run_ok("machine " + machine.name).out;
        EXPECT_EQ(nlohmann::ordered_json::parse(written), measure::to_json(machine));
        run_ok(fmt::format("machine {0} -o {0}.json", machine.name));
        EXPECT_EQ(text_of(path(machine.name + ".json")), written) << machine.name;
        EXPECT_EQ(run_ok(fmt::format("machine {}.json", machine.name)).out, written);
        EXPECT_EQ(measure::to_json(measure::read_machine(path(machine.name + ".json"))), measure::to_json(machine));
    }
}

TEST_F(MachineCommandTest, a_file_predicts_as_the_machine_until_it_is_edited) {
    run_ok("machine h200 -o same.json");
    EXPECT_EQ(ms_on("same.json"), ms_on("h200"));
    expect_says(run_ok("roofline --len 4096 --device same.json"), "h200: NVIDIA H200");
    auto edited = nlohmann::ordered_json::parse(text_of(path("same.json")));
    edited["cores"]["value"] = 66;
    std::ofstream(path("half.json")) << edited.dump();
    EXPECT_NEAR(ms_on("half.json") / ms_on("h200"), 2, 0.1);
    run_ok("machine h200 --set cores=66 -o set.json");
    EXPECT_EQ(ms_on("set.json"), ms_on("half.json"));
    // The error bars of the built-in machine do not hold for an edited one.
    for (const char* file : {"half.json", "set.json"})
        expect_says(run_ok(std::string("roofline --len 4096 --device ") + file), "no Records of h200-edited");
    run_ok("machine h200 --set clock_ghz=0.9 --set loaded_clock_ghz=0.9 --name slow -o slow.json");
    EXPECT_GT(ms_on("slow.json"), 1.3 * ms_on("h200"));
    EXPECT_EQ(run_ok("machine slow.json").json().at("name"), "slow");
}

TEST_F(MachineCommandTest, errors_name_the_option) {
    expect_error("machine h300", 2, "NAME: expected a machine file of tessera calibrate, or one of v100, ");
    expect_error("machine h300", 2, "perhaps h100");
    expect_error("roofline --device l41s", 2, "tessera machine describes them");
    expect_error("machine none.json", 66, "none.json");
    expect_error("machine h200 --set cores", 2, "--set: expected QUANTITY=VALUE");
    expect_error("machine h200 --set coers=3", 2, "perhaps cores");
    expect_error("machine h200 --set cores=x", 2, "--set: expected a number");
    expect_error("machine h200 --set cores=1.5", 2, "--set: cores: expected a whole number");
    expect_error("machine h200 --set dram_read_share=2", 2, "--set: dram_read_share: expected a number from");
    expect_error("machine --set cores=3", 2, "--set: expected the name of a machine with it");
    std::ofstream(path("other.json")) << "{\"a\": 1}";
    expect_error("machine h200 -o other.json", 73, "other.json: expected a new file or machine file");
    std::ofstream(path("zip.json")) << "PK\3\4 a zip archive";
    expect_error("machine zip.json", 65, "zip.json: expected a machine file: one JSON object, it is a zip archive");
    std::ofstream(path("next.json")) << "{\"schema\": \"tessera.machine/2\"}";
    expect_error("machine next.json", 65, "schema: expected \"tessera.machine/1\", got \"tessera.machine/2\"");
}

}  // namespace
}  // namespace tessera::machine_command_test
